"""When may the trainer's own devices train the drafter? While the trainer waits for samples that others decode.

In `separate_async` rollout has standalone replicas, which are always busy. The trainer's devices are idle from the
moment the trainer asks for samples until they are there. So requests do not matter: every spot worker that may train
starts once the wait has lasted `settle_s` (samples that are there already cost nothing), and all of them stop when the
wait is over. Pure, like `idle.replica_idle`: observations in, commands out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from verl_tlt.idle.planner import Command, PhaseAccount, StartTraining, StopTraining


@dataclass
class _SpotWorker:
    started: bool = False  # told to train and not known to have ended
    over: bool = False  # had its session in this wait, or failed
    train_from: float | None = None
    train_to: float | None = None
    stop_s: float | None = None


class TrainerIdlePlanner:
    """Decides during one wait of the trainer which spot workers train.

    Args:
        replicas: names of those on the trainer's devices, which have spot workers.
        begin: when the wait began.
        settle_s: seconds it must have lasted before training starts.
        spot_workers: those whose worker may train now and has a buffer worth it.

    Raises:
        ValueError: no replicas, or a spot worker of an unknown one.
    """

    def __init__(
        self, replicas: Sequence[str], *, begin: float, settle_s: float, spot_workers: Collection[str]
    ) -> None:
        if not replicas or not set(spot_workers) <= set(replicas):
            raise ValueError(f"Spot workers {sorted(spot_workers)} need replicas among {list(replicas)}.")
        self._replicas = {name: _SpotWorker() for name in replicas}
        self._workers = frozenset(spot_workers)
        self._begin, self._settle_s = begin, settle_s
        self._ended: float | None = None
        self._failures = 0

    def observe(
        self, now: float, inflight: Mapping[str, int], pending: int, open_loops: int = 0, refill_possible: bool = False
    ) -> list[Command]:
        """Take one look; how much is in flight does not matter to devices that do not decode."""
        if self._ended is not None or now - self._begin < self._settle_s:
            return []
        starting = [n for n, p in self._replicas.items() if n in self._workers and not (p.started or p.over)]
        for name in starting:
            self._replicas[name].started = True
        return [StartTraining(name) for name in starting]

    def training(self, replica: str, now: float) -> None:
        """The spot worker runs."""
        self._replicas[replica].train_from = now

    def done(self, replica: str, now: float) -> None:
        """The spot worker stopped by itself (its epochs are used up)."""
        self._close(replica, now)

    def stopped(self, replica: str, now: float) -> None:
        """The spot worker answered `StopTraining`."""
        if self._ended is not None:
            self._replicas[replica].stop_s = now - self._ended
        self._close(replica, now)

    def failed(self, replica: str, now: float) -> list[Command]:
        """The session raised or was killed: no further one in this wait."""
        self._failures += 1
        self._close(replica, now)
        return []

    def end(self, now: float) -> list[Command]:
        """The samples are there: stop every worker that was started."""
        if self._ended is None:
            self._ended = now
        return [StopTraining(name) for name, p in self._replicas.items() if p.started]

    def account(self, now: float) -> PhaseAccount:
        """The wait so far; final once `end` was called and the workers stopped."""
        end = now if self._ended is None else self._ended
        used = {}
        for name, p in self._replicas.items():
            start = now if p.train_from is None else p.train_from
            used[name] = max(0.0, min(now if p.train_to is None else p.train_to, end) - start)
        return PhaseAccount(
            bubble_s=dict.fromkeys(self._replicas, max(0.0, end - self._begin)),
            used_s=used,
            stop_s={n: p.stop_s for n, p in self._replicas.items() if p.stop_s is not None},
            failures=self._failures,
            end=end,
        )

    def _close(self, replica: str, now: float) -> None:
        place = self._replicas[replica]
        if place.train_from is not None and place.train_to is None:
            place.train_to = now
        place.started, place.over = False, True
