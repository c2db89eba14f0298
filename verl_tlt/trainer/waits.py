"""How the RL trainer waits for other processes: every wait has a bound, and ends in an answer or in `CallFailed`."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray
from ray import ObjectRef

from verl_tlt.errors import TLTError

CALL_S = 120.0
"""Bound in seconds of calls that take seconds at most: where one takes longer, the process does not work any more."""


class Clock:
    """Time, and waits for it; tests replace it by one on which hours pass at once."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def event(self) -> threading.Event:
        return threading.Event()

    def lock(self) -> threading.Lock:
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
        self._clock = clock
        self._end = clock.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - self._clock.monotonic())


class CallFailed(TLTError, RuntimeError):
    """A call into another process raised, found it dead (`died`), or was not answered in time (`late`)."""

    def __init__(self, message: str, *, died: bool = False, late: bool = False) -> None:
        super().__init__(message)
        self.died = died
        self.late = late


def answer(reference: ObjectRef | Sequence[ObjectRef], timeout_s: float) -> Any:
    """`ray.get` within `timeout_s` seconds for all together; `CallFailed`, in one line, where one raised or is late."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise CallFailed(f"no answer within {timeout_s:.0f} s", late=True) from error
    except ray.exceptions.RayError as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        # Ray's own memory monitor may have ended the actor, too.
        died = isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError)
        raise CallFailed(f"{type(error).__name__}: {last}", died=died) from error


def ask(reference: ObjectRef | Sequence[ObjectRef], timeout_s: float) -> Any:
    """As `answer`, of an actor that lives on: a call that is late is cancelled, and ends where it waits.

    Ray does not cancel a call that the actor has received and not begun. The actor begins it before any later call.
    """
    try:
        return answer(reference, timeout_s)
    except CallFailed as error:
        if error.late:
            calls = [reference] if isinstance(reference, ray.ObjectRef) else reference
            for call in calls:
                ray.cancel(call)
        raise


def arrived(reference: ObjectRef, timeout_s: float = 0.0) -> bool:
    """Whether a result, or an error in its place, arrives within so many seconds."""
    return bool(ray.wait([reference], timeout=timeout_s)[0])


def is_gone(pid: int, within_s: float) -> bool:
    """Whether a process of this node has ended within so many seconds, with all of its threads.

    A zombie has given back all of its memory, but for one whose other threads still live. Ray starts a process for
    this, so this module imports nothing large.
    """
    deadline = Deadline(within_s)
    try:
        process = psutil.Process(pid)
        while process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) or process.num_threads() > 1:
            if deadline.left() <= 0:
                return False
            time.sleep(0.05)
    except psutil.NoSuchProcess:
        pass
    return True
