"""Calls to Ray actors, each with a bound, whose failures are `CallFailed`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray

from verl_tlt.trainer.clock import SYSTEM, Clock, Deadline
from verl_tlt.trainer.fleet import Call, CallFailed
from verl_tlt.trainer.waits import BEAR_S

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

T = TypeVar("T")

ASK_S = BEAR_S / 4
"""A worker that has not answered by then is asked for a sign of life."""


class RayCall(Generic[T]):
    """A call to Ray actors (see `fleet.Call`); of `workers`, those it depends on, one that is silent fails it early.

    A worker's long work runs in a thread of its own, so that it gives a sign of life meanwhile.
    """

    def __init__(self, reference: ObjectRef, workers: Sequence[ActorHandle] = ()) -> None:
        self.references, self._workers = [reference], workers

    def done(self) -> bool:
        """Answer or error is there."""
        return self._comes(0)

    def _comes(self, timeout_s: float) -> bool:
        return bool(ray.wait(self.references, timeout=timeout_s)[0])

    def result(self, timeout_s: float) -> T:
        """The answer."""
        deadline = Deadline(timeout_s)
        while self._workers and deadline.left() > 0 and not self._comes(min(ASK_S, deadline.left())):
            signs, left = [worker.__ray_ready__.remote() for worker in self._workers], deadline.left()
            silent = ray.wait(signs, num_returns=len(signs), timeout=min(BEAR_S - ASK_S, left))[1]
            if silent and left >= BEAR_S - ASK_S and not self.done():
                raise CallFailed(f"no sign of life within {BEAR_S:.0f} s", silent=True)
        found: T = answer(self.references[0], deadline.left(), timeout_s)
        return found

    def excused(self) -> bool:
        """Never: who asks one worker alone knows it."""
        return False


class CombinedCall(Generic[T]):
    """The same call to all spot workers of a replica (see `fleet.Call`); `combine` makes one answer of theirs."""

    def __init__(
        self,
        calls: Sequence[Call[T]],
        combine: Callable[[Sequence[T]], T],
        clock: Clock = SYSTEM,
        excused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.calls, self._combine, self._clock = list(calls), combine, clock
        self.excused = excused

    @property
    def references(self) -> list[ObjectRef]:
        """What Ray can wait for."""
        return [reference for call in self.calls if isinstance(call, RayCall) for reference in call.references]

    def done(self) -> bool:
        """All have answered or failed."""
        return all(call.done() for call in self.calls)

    def result(self, timeout_s: float) -> T:
        """What all answered within the bound; one failure fails the whole, after the others have answered."""
        answers, failures, deadline = [], [], Deadline(timeout_s, self._clock)
        for call in self.calls:
            try:
                answers.append(call.result(deadline.left()))
            except CallFailed as error:
                failures.append(error)
        if failures:
            died, silent = any(error.died for error in failures), any(error.silent for error in failures)
            raise CallFailed(str(failures[0]), died, silent)
        return self._combine(answers)


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
        raise CallFailed(f"{type(error).__name__}: {last}", is_dead(error)) from error


def ask(reference: ObjectRef | Sequence[ObjectRef], timeout_s: float) -> Any:
    """`answer` of an actor that lives on when the call is given up: the call is taken back, and ends where it waits.

    Ray does not take back what the actor has got and not begun; that begins before whatever is called later.
    """
    try:
        return answer(reference, timeout_s)
    except CallFailed as error:
        if error.silent:
            for one in [reference] if isinstance(reference, ray.ObjectRef) else reference:
                ray.cancel(one)
        raise


def is_dead(error: Exception) -> bool:
    """Whether an error means that the actor is gone, also by Ray's own memory monitor; else it raised."""
    return isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError)
