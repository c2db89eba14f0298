"""What may still arrive in a sampling phase, from verl's replay buffer: as fresh as its last look, never half of one.

verl's buffer empties its sets, asks TransferQueue and fills them again, while the watch reads them from another thread:
in between nothing seems to be pending and no agent loop open, and a replica might leave that the next turn needs. So
the counts are taken right after each of its looks, and replaced at once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingWork:
    """What the trainer knows about work still to come."""

    pending: int = 0
    """Groups that no agent loop has taken up yet."""
    open_loops: int = 0
    """Groups whose agent loops may send another turn; always 0 where responses have one turn."""
    refill_possible: bool = False
    """Sampling may still ask for more groups, in a way that is known beforehand."""


class BufferWatch:
    """What a replay buffer says of work to come (`verl/trainer/ppo/v1/replay_buffer.py`), to be called at every look.

    Args:
        buffer: verl's, or a custom sampler derived from it. Of any other nothing is known, so nobody may leave.
        multi_turn: whether a response may take several requests.
        wanted: groups that one sampling takes.
    """

    def __init__(self, buffer: Any, *, multi_turn: bool, wanted: int) -> None:
        self._buffer, self._multi_turn, self._wanted = buffer, multi_turn, wanted
        look = getattr(buffer, "_sync_metadata_from_transfer_queue", None)
        if look is None:
            logger.warning("%s does not say what may still arrive, so no replica leaves early.", type(buffer).__name__)
            self._seen = PendingWork(refill_possible=True)
            return
        self._seen = self._count()

        def look_and_count() -> None:
            look()
            self._seen = self._count()

        buffer._sync_metadata_from_transfer_queue = look_and_count

    def __call__(self) -> PendingWork:
        return self._seen

    def _count(self) -> PendingWork:
        buffer = self._buffer
        # DAPO replaces groups until enough are left; the buffer has put filtered ones aside before each look.
        refills = buffer.filter_groups_metric is not None or buffer.sync_refill_failed_groups
        return PendingWork(
            pending=len(buffer.pending_keys["train"]),
            open_loops=len(buffer.running_keys["train"]) if self._multi_turn else 0,
            refill_possible=refills and len(buffer.finished_keys["train"]) < self._wanted,
        )
