"""The spot workers of one replica, which start and stop together, and which worker gets or merges what.

Ranks of the actor that compute the same sequences form a group. Its captured sequences are shared among the spot
workers on its ranks' devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from verl_tlt.messages.training import BufferStats, HeldOutScores, SessionResult
from verl_tlt.trainer.clock import SYSTEM
from verl_tlt.trainer.ray_calls import CombinedCall, RayCall

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

T = TypeVar("T")

START_S = 300.0
"""Spot workers are up by then; until then they are not waited for, nor taken for silent."""
FAN_IN = 8
"""Workers of a group that merges, and slices: on each level a worker reads no more than one drafter's change."""


@dataclass
class ReplicaWorkers:
    """Spot workers, one on each device of a colocated replica; a standalone replica has none."""

    replica: str
    ranks: Sequence[int] = ()
    """The replica's ranks of the actor's worker group: a spot worker is on the device of each."""
    handles: dict[str, ActorHandle] = field(default_factory=dict)
    """By spot worker, in the order of the ranks; empty until they are started."""
    restarts: int = 0
    rehearsed: bool = False
    """They were told to run once what a session runs (`SpotWorker.warm_up`)."""
    _starting: dict[str, ObjectRef] = field(default_factory=dict)  # by worker: ready when it is up
    _since: float = 0.0

    def names(self) -> list[str]:
        """The spot workers' names; the first one's is the replica's."""
        return [self.replica if i == 0 else f"{self.replica}/{i}" for i in range(len(self.ranks))]

    def first(self) -> ActorHandle:
        """One of them, where one is enough; all hold the same versions."""
        return next(iter(self.handles.values()))

    def begin(self, handles: Mapping[str, ActorHandle]) -> None:
        """These workers, which are only starting, take the place of those there were."""
        self.handles, self._since, self.rehearsed = dict(handles), SYSTEM.monotonic(), False
        self._starting = {name: worker.__ray_ready__.remote() for name, worker in handles.items()}

    def starts(self, name: str) -> bool:
        """Whether a worker is still starting, and cannot answer yet."""
        waiting, since = self._starting, self._since  # another thread may begin with others meanwhile
        if (ready := waiting.get(name)) is not None and RayCall(ready).done():
            waiting.pop(name, None)
        return name in waiting and SYSTEM.monotonic() - since < START_S

    def starting(self) -> bool:
        """Whether one of them is still starting."""
        return any(self.starts(name) for name in self.handles)

    def up(self) -> list[ActorHandle]:
        """Those that are not."""
        return [worker for name, worker in self.handles.items() if not self.starts(name)]

    def call(self, method: str, combine: Callable[[Sequence[T]], T], *arguments: object) -> CombinedCall[T]:
        """Call a method of all of them."""
        return self.sent({name: getattr(w, method).remote(*arguments) for name, w in self.handles.items()}, combine)

    def sent(self, calls: Mapping[str, ObjectRef], combine: Callable[[Sequence[T]], T]) -> CombinedCall[T]:
        """Calls that were made to some of them, as one."""
        asked = self.handles
        each = [RayCall[T](call, [] if self.starts(name) else [asked[name]]) for name, call in calls.items()]
        return CombinedCall(each, combine, excused=lambda: self.handles is not asked or self.starting())


@dataclass(frozen=True)
class ShardRoutes:
    """Which captured sequences each rank of the actor sends, and each spot worker receives."""

    shares: tuple[int, ...]
    """For each rank: among how many workers its group's sequences are shared."""
    sources: Mapping[str, tuple[tuple[int, ...], int]]
    """For each worker: the ranks of its group, and which share of theirs it gets."""


def route(groups: Sequence[int], workers: Mapping[str, int]) -> ShardRoutes:
    """Share each group's sequences among the workers on its ranks' devices.

    `groups` has for each rank the number of its group (verl's data-parallel rank), `workers` each worker's rank.
    """
    shares = Counter[int]()
    sources = {}
    for name, rank in workers.items():
        group = groups[rank]
        sources[name] = (tuple(r for r, other in enumerate(groups) if other == group), shares[group])
        shares[group] += 1
    return ShardRoutes(tuple(max(1, shares[group]) for group in groups), sources)


def capture_ranks(workers: Mapping[str, int], nodes: Sequence[str]) -> dict[str, int]:
    """For each worker the rank that copies the verifier weights for it: the same one for all workers of a node.

    `workers` has each worker's rank, `nodes` each rank's node.
    """
    first: dict[str, int] = {}
    return {name: first.setdefault(nodes[rank], rank) for name, rank in workers.items()}


def combined_session(results: Sequence[SessionResult]) -> SessionResult:
    """The sessions that a replica's workers had at the same time, as one."""
    longest = max(r.seconds for r in results)
    trained = [r for r in results if r.tokens and math.isfinite(r.loss)]
    learned = sum(r.tokens for r in trained)
    return SessionResult(
        outcome="stopped" if any(r.outcome == "stopped" for r in results) else "exhausted",
        steps=sum(r.steps for r in results),
        tokens=sum(r.tokens for r in results),
        epochs=max(r.epochs for r in results),
        skipped=sum(r.skipped for r in results),
        seconds=longest,
        loss=sum(r.loss * r.tokens for r in trained) / learned if trained else math.nan,
        scores=HeldOutScores.combined([r.scores for r in results if r.scores is not None]),
        judged_s=max(r.judged_s for r in results),
        slowest_s=max(r.slowest_s for r in results),
        devices=sum(r.seconds for r in results) / longest if longest else 0.0,
    )


def combined_buffers(stats: Sequence[BufferStats]) -> BufferStats:
    """What a replica's workers hold; `train_tokens` is what the fullest has, for one that can train is enough."""
    return BufferStats(
        sequences=sum(s.sequences for s in stats),
        tokens=sum(s.tokens for s in stats),
        train_tokens=max(s.train_tokens for s in stats),
        bytes=sum(s.bytes for s in stats),
        incomplete=sum(s.incomplete for s in stats),
        responses=sum(s.responses for s in stats),
        draftable=sum(s.draftable for s in stats),
    )


def start_merge(workers: Sequence[ActorHandle]) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """Have these workers merge; does not wait.

    `FAN_IN` workers make a group, each slice of the parameters is averaged over the group by another of its members,
    and `FAN_IN` groups make one of the next level. The arithmetic is `spot_worker.merge`'s.

    Returns:
        (references of the facts, a `MergeFacts` each, all alike; references of the slices, for `SpotWorker.adopt`).
    """
    groups = [([worker], list(worker.hand_in.options(num_returns=FAN_IN).remote(FAN_IN))) for worker in workers]
    facts: list[ObjectRef] = []
    while not facts:
        last = len(groups) <= FAN_IN
        batches = [groups[i : i + FAN_IN] for i in range(0, len(groups), FAN_IN)]
        groups = []
        for batch in batches:
            members = [worker for below, _ in batch for worker in below]
            averages = []
            for part in range(FAN_IN):
                averager = members[part * len(members) // FAN_IN]  # evenly over the members, and so over their nodes
                call = averager.average.options(num_returns=2)
                averages.append(call.remote(*[row[part] for _, row in batch], last=last))
            groups.append((members, [average for _, average in averages]))
            if last:
                facts = [reference for reference, _ in averages]
    return facts, groups[0][1]
