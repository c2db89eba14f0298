"""Who averages what, when several spot workers merge: slices dealt out over a tree of groups.

Eight workers make a group, each slice of the parameters is averaged over the group by another of its members, eight
groups make a group of the next level. The arithmetic is `spot_worker.merge`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FAN_IN = 8
"""Workers of a group, and slices. 64 workers make two levels, and on each a worker reads no more than one delta."""


def start_merge(workers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Have these workers merge; waits for nobody.

    Args:
        workers: handles of `SpotWorker` actors, neighbours close to each other.

    Returns:
        (references of the facts, a `MergeFacts` each, all alike; references of the slices, for `SpotWorker.adopt`).
    """
    groups = [([worker], list(worker.hand_in.options(num_returns=FAN_IN).remote(FAN_IN))) for worker in workers]
    facts: list[Any] = []
    while not facts:
        last = len(groups) <= FAN_IN
        batches = [groups[i : i + FAN_IN] for i in range(0, len(groups), FAN_IN)]
        groups = []
        for batch in batches:
            members = [worker for below, _ in batch for worker in below]
            joined = [_lead(members, s).average.options(num_returns=2).remote(*[row[s] for _, row in batch], last=last)
                      for s in range(FAN_IN)]  # fmt: skip
            groups.append((members, [reference for _, reference in joined]))
            if last:
                facts = [reference for reference, _ in joined]
    return facts, groups[0][1]


def _lead(members: Sequence[Any], part: int) -> Any:
    """Who averages this slice: evenly over the members, and so over their nodes."""
    return members[part * len(members) // FAN_IN]
