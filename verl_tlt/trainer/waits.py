"""How the trainer waits for other processes: whoever is asked answers or raises, is silent, or has died.

Every wait has a bound, after which whoever has not answered is *silent*. A spot worker is silent, too, when it gives no
sign of life for `SILENT_S`, however long the bound is: its long work runs in a thread of its own (but for an export,
`Fleet.export`). A spot worker that died or is silent is counted and replaced. One that is still starting, or was
replaced meanwhile, is *excused*: it is left out and kept. The controller's hook that waits charges the seconds to the
step, by name.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from verl_tlt.errors import TLTError

T = TypeVar("T")

logger = logging.getLogger(__name__)

SILENT_S = 2.0
"""Seconds without an answer that should be there, or without a sign of life, after which a spot worker is silent."""
ASK_S = SILENT_S / 4
"""Seconds after which a spot worker that has not answered is asked for a sign of life."""
CALL_S = 120.0
"""Bound in seconds of calls that take seconds at most: where one takes longer, the actor is gone."""


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
        self._clock, self._end = clock, clock.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - self._clock.monotonic())


class CallFailed(TLTError, RuntimeError):
    """A call into another process raised, found it dead (`died`), or was not answered in time (`silent`)."""

    def __init__(self, message: str, died: bool = False, silent: bool = False) -> None:
        super().__init__(message)
        self.died, self.silent = died, silent


def answer(reference: ObjectRef | Sequence[ObjectRef], timeout_s: float, bound_s: float | None = None) -> Any:
    """`ray.get` within `timeout_s` seconds for all together; `CallFailed`, in one line, where one raised or is late.

    `bound_s` is what is said to have passed, where part of the bound is used up.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise CallFailed(f"no answer within {timeout_s if bound_s is None else bound_s:.0f} s", silent=True) from error
    except ray.exceptions.RayError as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        # Ray's own memory monitor may have ended the actor, too.
        gone = isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError)
        raise CallFailed(f"{type(error).__name__}: {last}", died=gone) from error


def ask(reference: ObjectRef | Sequence[ObjectRef], timeout_s: float) -> Any:
    """As `answer`, of an actor that lives on: a call that is late is taken back, and ends where it waits.

    Ray does not take back what the actor has got and not begun; that begins before whatever is called later.
    """
    try:
        return answer(reference, timeout_s)
    except CallFailed as error:
        if error.silent:
            for call in [reference] if isinstance(reference, ray.ObjectRef) else reference:
                ray.cancel(call)
        raise


@dataclass(frozen=True)
class Call(Generic[T]):
    """A call under way, the same to one or several spot workers; `combine` makes one answer of theirs.

    The call depends on `workers`, which are up: all must give signs of life. `excused`: whether a failure says nothing
    about who serves now.
    """

    references: Sequence[ObjectRef]
    combine: Callable[[list[Any]], T]
    workers: Sequence[ActorHandle]
    excused: Callable[[], bool] = lambda: False

    def result(self, timeout_s: float) -> T:
        """The combined answer; `CallFailed` where one raised, died or is silent, once the others have answered."""
        deadline = Deadline(timeout_s)
        while self.workers and deadline.left() > 0 and not _arrived(self.references, min(ASK_S, deadline.left())):
            signs, left = [worker.__ray_ready__.remote() for worker in self.workers], deadline.left()
            alive = _arrived(signs, min(SILENT_S - ASK_S, left))
            if not alive and left >= SILENT_S - ASK_S and not _arrived(self.references, 0):
                raise CallFailed(f"no sign of life within {SILENT_S:.0f} s", silent=True)
        answers, failures = [], []
        for reference in self.references:
            try:
                answers.append(answer(reference, deadline.left(), timeout_s))
            except CallFailed as error:
                failures.append(error)
        if failures:
            died, silent = any(error.died for error in failures), any(error.silent for error in failures)
            raise CallFailed(str(failures[0]), died, silent)
        return self.combine(answers)


def _arrived(references: Sequence[ObjectRef], timeout_s: float) -> bool:
    """Whether all results arrive within so many seconds."""
    return not ray.wait(references, num_returns=len(references), timeout=timeout_s)[1]


class Failure(NamedTuple):
    """A failure of one replica's spot workers outside a session."""

    replica: str
    during: str  # what was waited for
    replaced: bool
    """The spot workers were replaced: they died, were silent, or raised where that leaves them unlike the others."""


class Waits:
    """Waits for replicas' spot workers; `replace` puts others in their places, and does not wait for these.

    Used by the trainer's thread and by the one that merges.
    """

    def __init__(self, replace: Callable[[Collection[str]], None], clock: Clock = SYSTEM) -> None:
        self._replace, self._clock = replace, clock
        self._failures: deque[Failure] = deque()
        self._lock = threading.Lock()
        self._over = False

    def answers(
        self, during: str, calls: Mapping[str, Call[T]], within_s: float, *, keep: bool = False
    ) -> dict[str, T]:
        """What replicas' spot workers answer within a bound that they share; those that fail are left out.

        Workers that fail are replaced together, since a successor takes over what those who stay hold. `keep`: one that
        raises an error is not replaced, for it holds what it held before.
        """
        deadline, answers, errors = Deadline(within_s, self._clock), {}, {}
        for name, call in calls.items():
            try:
                answers[name] = call.result(deadline.left())
            except CallFailed as error:
                errors[name] = error
        kept = {name for name, error in errors.items() if keep and not (error.died or error.silent)}
        self.failed(during, calls, errors, kept)
        return answers

    def failed(
        self, during: str, calls: Mapping[str, Call[T]], errors: Mapping[str, CallFailed], kept: Collection[str] = ()
    ) -> None:
        """Count failed calls, and replace the workers of all replicas but those `kept`."""
        with self._lock:  # or both threads replace one
            counted = [name for name in errors if not self._over and not calls[name].excused()]
            for name in counted:
                logger.warning("the spot worker of %s failed (%s): %s", name, during, errors[name])
                self._failures.append(Failure(name, during, replaced=name not in kept))
            if gone := [name for name in counted if name not in kept]:
                self._replace(gone)

    def failures(self) -> Iterator[Failure]:
        while self._failures:
            yield self._failures.popleft()

    def close(self) -> None:
        """The run is over: workers that end from now on have not failed."""
        self._over = True
