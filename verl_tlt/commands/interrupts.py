"""Ctrl-C, SIGTERM and SIGHUP end a command in the same way: by a KeyboardInterrupt."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from verl_tlt.errors import TLTError


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
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that one `finally` covers them all.

    A library that a signal stops halfway may fail with an error of its own as it cleans up, as `torch.vmap` does: that
    is an interrupt, too. What a user is told of the clean-up stays: a TLTError, or an OSError as of a full disk.
    """
    with _handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
        try:
            yield
        except (TLTError, OSError):
            raise
        except Exception as error:
            if _came_of_interrupt(error):
                raise KeyboardInterrupt from error
            raise


def _came_of_interrupt(error: BaseException | None) -> bool:
    """Whether the error was raised while a KeyboardInterrupt was handled."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


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
