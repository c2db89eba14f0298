"""Time, and waiting for it: what is given a clock runs on a test's own, in whole RL steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """The machine's. A test's has the same methods, and what it makes waits for its own time."""

    def time(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that only ever grow, for what is measured."""
        return time.monotonic()

    def event(self) -> threading.Event:
        """One that is not set."""
        return threading.Event()

    def lock(self) -> threading.Lock:
        """One that is free."""
        return threading.Lock()

    def start(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread that runs `target` from now on, and does not keep the process from ending."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread


SYSTEM = Clock()


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
