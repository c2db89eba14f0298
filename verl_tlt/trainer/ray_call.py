"""A call to a Ray actor with a bound, whose failures are `CallFailed`."""

from __future__ import annotations

from typing import Any

import ray

from verl_tlt.trainer.fleet import CallFailed


class RayCall:
    """See `fleet.Call`."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def done(self) -> bool:
        """Whether the object is there, or the error is."""
        return bool(ray.wait([self.reference], timeout=0)[0])

    def result(self, timeout_s: float) -> Any:
        """The object, within a bound."""
        return answer(self.reference, timeout_s)


def answer(reference: Any, timeout_s: float) -> Any:
    """`ray.get` with a bound, whose errors are one line each.

    Args:
        reference: an ObjectRef or a list of them.
        timeout_s: seconds, for all of them together.

    Raises:
        CallFailed: something raised, died or took too long.
    """
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
