"""Time, and waiting for it: what is given a clock runs on a test's own, in whole RL steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Event(Protocol):
    """As `threading.Event`."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


class Lock(Protocol):
    """As `threading.Lock`."""

    def acquire(self, *, timeout: float) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...


class Thread(Protocol):
    """As `threading.Thread`."""

    def join(self, timeout: float) -> None: ...

    def is_alive(self) -> bool: ...


class Clock(Protocol):
    """What measures time, and makes what waits for it."""

    def time(self) -> float:
        """Unix seconds."""

    def monotonic(self) -> float:
        """Seconds that only ever grow, for what is measured."""

    def event(self) -> Event:
        """One that is not set."""

    def lock(self) -> Lock:
        """One that is free."""

    def start(self, target: Callable[[], None], name: str) -> Thread:
        """A thread that runs `target` from now on, and does not keep the process from ending."""


class SystemClock:
    """The machine's."""

    def time(self) -> float:
        """See `Clock`."""
        return time.time()

    def monotonic(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def event(self) -> Event:
        """See `Clock`."""
        return threading.Event()

    def lock(self) -> Lock:
        """See `Clock`."""
        return threading.Lock()

    def start(self, target: Callable[[], None], name: str) -> Thread:
        """See `Clock`."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread


SYSTEM = SystemClock()


class Deadline:
    """A bound that several waits share.

    Args:
        seconds: from now.
        clock: by which they are counted.
    """

    def __init__(self, seconds: float, clock: Clock = SYSTEM) -> None:
        self._clock, self._end = clock, clock.monotonic() + seconds

    def left(self) -> float:
        """Seconds until it, 0 from then on."""
        return max(0.0, self._end - self._clock.monotonic())
