"""When may the trainer's own devices train the drafter? While the trainer waits for samples that others decode.

In `separate_async` rollout has standalone replicas, which are always busy. The trainer's devices are idle from the
moment the trainer asks for samples until they are there: to the planner they are replicas that sleep from the start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from verl_tlt.idle.planner import Command, StartTraining
from verl_tlt.idle.replica_idle import ReplicaIdlePlanner, State


class TrainerIdlePlanner(ReplicaIdlePlanner):
    """Decides during one wait of the trainer which spot workers train: all that may, once it has lasted `settle_s`.

    Samples that are there already cost nothing, hence `settle_s`. `spot_workers` have enough to train on.
    """

    def __init__(
        self, replicas: Sequence[str], *, begin: float, settle_s: float, spot_workers: Collection[str]
    ) -> None:
        super().__init__(replicas, expected_requests=0, settle_s=settle_s, spot_workers=spot_workers)
        self._begin = begin
        for r in self._replicas.values():
            r.state, r.idle_since = State.IDLE, begin

    def observe(
        self, now: float, inflight: Mapping[str, int], pending: int, open_loops: int = 0, refill_possible: bool = False
    ) -> list[Command]:
        """Take one look; how much is in flight does not matter to devices that do not decode."""
        if self._ended is not None or now - self._begin < self._settle_s:
            return []
        starting = [n for n, r in self._replicas.items() if n in self._workers and not (r.started or r.over)]
        for name in starting:
            self._replicas[name].started = True
        return [StartTraining(name) for name in starting]

    def recall(self) -> list[Command]:
        """Nothing: these replicas serve no requests."""
        return []
