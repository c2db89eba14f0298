"""Time, and waiting for it; a test gives a clock of its own, on which hours pass at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """The machine's."""

    def time(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that only ever grow."""
        return time.monotonic()

    def event(self) -> threading.Event:
        """One that is not set."""
        return threading.Event()

    def lock(self) -> threading.Lock:
        """One that is free."""
        return threading.Lock()

    def start(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A daemon thread that runs `target` from now on."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread


SYSTEM = Clock()


class Deadline:
    """A bound that several waits share: some seconds from now."""

    def __init__(self, seconds: float, clock: Clock = SYSTEM) -> None:
        self._clock, self._end = clock, clock.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._end - self._clock.monotonic())
