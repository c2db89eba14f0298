"""Ctrl-C, SIGTERM and SIGHUP end a command in the same way: by a KeyboardInterrupt."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Deliver SIGINT, SIGTERM and SIGHUP only at the end of the block.

    It is for blocks that clean up, or that make what a `finally` needs.
    """
    came: list[int] = []
    with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda number, _: came.append(number)):
        yield
    if came:
        signal.raise_signal(came[0])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that one `finally` covers them all."""
    with _handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
        yield


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle these signals within the block, except those that are ignored, as `nohup` has it.

    Signals arrive in the main thread; in another one there is nothing to handle.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
