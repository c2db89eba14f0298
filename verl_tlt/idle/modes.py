"""How verl's trainer modes differ for TLT: whose time is idle, and whether more requests may come at any time.

Plain data without verl, which the doctor reads before anything is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModeRule:
    """One trainer mode's rule."""

    idle: Literal["replicas", "trainer"]
    """Whose idle time trains the drafter: replicas that run dry while others decode (`idle.replica_idle`), or the
    trainer's devices while they wait for samples (`idle.trainer_idle`)."""
    recall: bool = False
    """The sampler may send more groups at any moment, so a replica that leaves keeps its weights (on the host) and is
    called back before they are sent. Elsewhere the planner knows beforehand and no replica leaves."""


MODE_RULES = {
    # One batch at a time; refills come only with settings under which no replica leaves.
    "sync": ModeRule("replicas"),
    # The next batch is decoded already, and failed or stale groups are replaced while the trainer waits.
    "colocate_async": ModeRule("replicas", recall=True),
    # Rollout has replicas of its own, which are always busy.
    "separate_async": ModeRule("trainer"),
}
"""By `trainer.v1.trainer_mode`."""
