"""When may the trainer's own devices train the drafter? While they wait for samples, where others do the decoding.

In `separate_async` rollout has devices of its own, fed all the time, and nobody there leaves. What idles are the
trainer's devices, from the moment the trainer asks for samples until they are there. So no request is looked at: every
spot worker that may train starts once the wait has lasted `settle_s` (samples that are there already cost nothing), and
all of them stop when the wait is over. Pure, like `idle.replica_idle`: observations in, commands out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from verl_tlt.idle.planner import Command, PhaseAccount, StartTraining, StopTraining


@dataclass
class _Place:
    started: bool = False  # told to train and not known to have ended
    over: bool = False  # had its session in this wait, or failed
    train_from: float | None = None
    train_to: float | None = None
    stop_s: float | None = None


class TrainerIdlePlanner:
    """Decides for one wait of the trainer which spot workers train.

    Args:
        places: names of the replicas on the trainer's devices, one spot worker each.
        begin: when the wait began.
        settle_s: seconds it must have lasted before training starts.
        spot_workers: those whose worker may train now and has a buffer worth it.

    Raises:
        ValueError: no places, or a spot worker of an unknown one.
    """

    def __init__(self, places: Sequence[str], *, begin: float, settle_s: float, spot_workers: Collection[str]) -> None:
        if not places or not set(spot_workers) <= set(places):
            raise ValueError(f"Spot workers {sorted(spot_workers)} need places among {list(places)}.")
        self._places = {name: _Place() for name in places}
        self._workers = frozenset(spot_workers)
        self._begin, self._settle_s = begin, settle_s
        self._ended: float | None = None
        self._failures = 0

    def observe(
        self,
        now: float,
        inflight: Mapping[str, int],
        pending: int,
        open_loops: int = 0,
        refill_possible: bool = False,
    ) -> list[Command]:
        """Take one look; how much is in flight does not matter to devices that do not decode."""
        if self._ended is not None or now - self._begin < self._settle_s:
            return []
        starting = [n for n, p in self._places.items() if n in self._workers and not (p.started or p.over)]
        for name in starting:
            self._places[name].started = True
        return [StartTraining(name) for name in starting]

    def training(self, replica: str, now: float) -> list[Command]:
        """The spot worker runs."""
        self._places[replica].train_from = now
        return []

    def done(self, replica: str, now: float) -> list[Command]:
        """The spot worker stopped by itself (its epochs are used up)."""
        self._close(replica, now)
        return []

    def stopped(self, replica: str, now: float) -> list[Command]:
        """The spot worker answered `StopTraining`."""
        if self._ended is not None:
            self._places[replica].stop_s = now - self._ended
        self._close(replica, now)
        return []

    def failed(self, replica: str, now: float) -> list[Command]:
        """The session raised or was killed: no further one in this wait."""
        self._failures += 1
        self._close(replica, now)
        return []

    def end(self, now: float) -> list[Command]:
        """The samples are there: stop every worker that was started."""
        if self._ended is None:
            self._ended = now
        return [StopTraining(name) for name, p in self._places.items() if p.started]

    def account(self, now: float) -> PhaseAccount:
        """The wait so far; final once `end` was called and the workers stopped."""
        end = now if self._ended is None else self._ended
        used, training = {}, {}
        for name, p in self._places.items():
            start = now if p.train_from is None else p.train_from
            stop = now if p.train_to is None else p.train_to
            training[name] = max(0.0, stop - start)
            used[name] = max(0.0, min(stop, end) - start)
        return PhaseAccount(
            bubble_s=dict.fromkeys(self._places, max(0.0, end - self._begin)),
            used_s=used,
            training_s=training,
            stop_s={n: p.stop_s for n, p in self._places.items() if p.stop_s is not None},
            refusals=0,
            failures=self._failures,
            obstacles=dict.fromkeys(self._places.keys() - self._workers, "no spot worker that may train"),
            end=end,
        )

    # Nobody leaves the load balancer here, so these are never asked for and there is nobody to call back.

    def left(self, replica: str) -> list[Command]:
        """Does not happen."""
        return []

    def slept(self, replica: str) -> list[Command]:
        """Does not happen."""
        return []

    def refused(self, replica: str, now: float) -> list[Command]:
        """Does not happen."""
        return []

    def awake(self, replica: str, now: float) -> list[Command]:
        """Does not happen."""
        return []

    def recall(self) -> list[Command]:
        """More requests change nothing: they go to other devices."""
        return []

    def _close(self, replica: str, now: float) -> None:
        place = self._places[replica]
        if place.train_from is not None and place.train_to is None:
            place.train_to = now
        place.started, place.over = False, True
