"""Calls to Ray actors, each with a bound, whose failures are `CallFailed`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray

from verl_tlt.trainer.clock import SYSTEM, Clock, Deadline
from verl_tlt.trainer.fleet import Call, CallFailed

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")


class RayCall(Generic[T]):
    """A call to one Ray actor (see `fleet.Call`)."""

    def __init__(self, reference: ObjectRef) -> None:
        self.references = [reference]

    def done(self) -> bool:
        """Answer or error is there."""
        return bool(ray.wait(self.references, timeout=0)[0])

    def result(self, timeout_s: float) -> T:
        """The answer."""
        found: T = answer(self.references[0], timeout_s)
        return found


class CombinedCall(Generic[T]):
    """The same call to all spot workers of a replica (see `fleet.Call`); `combine` makes one answer of theirs."""

    def __init__(self, calls: Sequence[Call[T]], combine: Callable[[Sequence[T]], T], clock: Clock = SYSTEM) -> None:
        self.calls, self._combine, self._clock = list(calls), combine, clock

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
            raise CallFailed(str(failures[0]), died=any(error.died for error in failures))
        return self._combine(answers)


def answer(reference: ObjectRef | Sequence[ObjectRef], timeout_s: float) -> Any:
    """`ray.get` within `timeout_s` seconds for all together; `CallFailed`, in one line, where one raised or is late."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise CallFailed(f"no answer within {timeout_s:.0f} s", silent=True) from error
    except ray.exceptions.RayError as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        raise CallFailed(f"{type(error).__name__}: {last}", is_dead(error)) from error


def is_dead(error: Exception) -> bool:
    """Whether an error means that the actor is gone, also by Ray's own memory monitor; else it raised."""
    return isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError)
