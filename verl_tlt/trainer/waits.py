"""Waiting for spot workers: every wait is bounded, and a worker that fails in one is counted and replaced.

The seconds are charged to the step, by name, by whichever of the controller's hooks waits (`Controller._charged`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from verl_tlt.trainer.clock import SYSTEM, Clock, Deadline
from verl_tlt.trainer.fleet import Call, CallFailed

T = TypeVar("T")

logger = logging.getLogger(__name__)

BEAR_S = 2.0
"""What an RL step waits for a spot worker whose answer should be there, or that gives no sign of life."""


@dataclass(frozen=True)
class Failure:
    """A failure of one replica's spot workers outside a session."""

    replica: str
    during: str
    """What was waited for."""
    replaced: bool
    """Its spot workers were: they died, were silent, or raised where that leaves them unlike the others."""


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

        They are replaced together, since a successor takes over what those who stay hold. `keep`: an error that one
        raises does not cost it its place, for it holds what it held before.
        """
        deadline, found, errors = Deadline(within_s, self._clock), {}, {}
        for name, call in calls.items():
            try:
                found[name] = call.result(deadline.left())
            except CallFailed as error:
                errors[name] = error
        kept = {name for name, error in errors.items() if keep and not (error.died or error.silent)}
        self.failed(during, calls, errors, kept)
        return found

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
        """Those since it was last asked."""
        while self._failures:
            yield self._failures.popleft()

    def close(self) -> None:
        """The run is over: whoever ends now was meant to."""
        self._over = True
