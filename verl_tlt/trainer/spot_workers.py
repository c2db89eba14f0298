"""The spot workers of a run and the actor that feeds them, as the trainer calls them; with its servers: the fleet.

A spot worker shares a bundle with the actor's rank on its device (verl's workers take a third of a GPU each), so it has
the same device and dies with the job. It is a plain actor rather than part of a worker group, because it must be
possible to kill and restart one alone. All workers of a replica start, stop and are replaced together. Ranks of the
actor that compute the same sequences form a group, whose sequences are shared among the workers on its devices.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.plugin.platform.platform_manager import get_platform

from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import BufferStats, DrafterProvenance, MergeFacts, SessionResult, TappedStates, TapReady
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.spot_worker.merge import start_merge
from verl_tlt.spot_worker.worker import SpotWorker
from verl_tlt.trace.events import TRAINER_DEVICE
from verl_tlt.trainer.run_setup import SpotPlan
from verl_tlt.trainer.servers import Servers
from verl_tlt.trainer.waits import CALL_S, SILENT_S, SYSTEM, Call, CallFailed, Deadline, Waits, answer

if TYPE_CHECKING:
    from verl.single_controller.base import WorkerGroup
    from verl.single_controller.ray import RayResourcePool
    from verl.workers.rollout.llm_server import LLMServerManager

T = TypeVar("T")

logger = logging.getLogger(__name__)

START_S = 300.0
"""Bound in seconds of a spot worker's start; meanwhile it is not waited for, nor taken for silent."""


@dataclass
class ReplicaWorkers:
    """The spot workers of one colocated replica, one on each of its devices; without such replicas, of one device."""

    replica: str
    ranks: Sequence[int]  # the actor's ranks on the workers' devices
    handles: dict[str, ActorHandle] = field(default_factory=dict)
    """Ray's handles by spot worker, in the order of the ranks; empty until the workers are started."""
    restarts: int = 0
    rehearsed: bool = False  # the workers were asked to run once what a session runs (`SpotWorker.warm_up`)
    given: dict[str, str] = field(default_factory=dict)  # by worker: id of the verifier weights it was sent last
    _starting: dict[str, ObjectRef] = field(default_factory=dict)  # by worker: ready when it is up
    _since: float = 0.0

    def names(self) -> list[str]:
        """The spot workers' names; the first one's is the replica's."""
        return [self.replica if i == 0 else f"{self.replica}/{i}" for i in range(len(self.ranks))]

    def first(self) -> ActorHandle:
        """One of the workers, where one is enough; all hold the same versions."""
        return next(iter(self.handles.values()))

    def begin(self, handles: Mapping[str, ActorHandle]) -> None:
        """Put workers that are just starting in the place of the present ones."""
        self.handles, self._since, self.rehearsed, self.given = dict(handles), SYSTEM.monotonic(), False, {}
        self._starting = {name: worker.__ray_ready__.remote() for name, worker in handles.items()}

    def _starts(self, name: str) -> bool:
        """Whether a worker is still starting, and cannot answer yet."""
        waiting, since = self._starting, self._since  # another thread may begin with others meanwhile
        if (ready := waiting.get(name)) is not None and ray.wait([ready], timeout=0)[0]:
            waiting.pop(name, None)
        return name in waiting and SYSTEM.monotonic() - since < START_S

    def starting(self) -> bool:
        return any(self._starts(name) for name in self.handles)

    def up(self) -> list[ActorHandle]:
        """The workers that have started."""
        return [worker for name, worker in self.handles.items() if not self._starts(name)]

    def call(self, method: str, combine: Callable[[list[Any]], T], *arguments: object) -> Call[T]:
        return self.sent({name: getattr(w, method).remote(*arguments) for name, w in self.handles.items()}, combine)

    def sent(self, calls: Mapping[str, ObjectRef], combine: Callable[[list[Any]], T], *, signs: bool = True) -> Call[T]:
        """Calls that were made to some workers, as one; `signs`: each can give a sign of life meanwhile."""
        handles = self.handles
        up = [handles[name] for name in calls if signs and not self._starts(name)]
        return Call(list(calls.values()), combine, up, lambda: self.handles is not handles or self.starting())


class Fleet(Servers):
    """All that lies outside the trainer's process: rollout servers, actor, and spot workers on its devices (`pool`).

    Methods about spot workers take the name of a replica, for all of its workers. Where no replica shares the actor's
    devices, each device counts as one, with a name of its own.
    """

    def __init__(
        self,
        llm_server_manager: LLMServerManager,
        actor: WorkerGroup,
        store: ActorHandle,
        pool: RayResourcePool,
        spot: SpotPlan,
        standalone: LLMServerManager | None = None,
    ) -> None:
        super().__init__(llm_server_manager, standalone, actor.world_size, store)
        self.actor, self.pool, self.spot = actor, pool, spot
        ranks = {r.name: r.ranks for r in self.replicas.values() if r.colocated}
        devices: dict[str, Sequence[int]] = {f"{TRAINER_DEVICE} {rank}": [rank] for rank in range(actor.world_size)}
        self.spot_workers = {name: ReplicaWorkers(name, own) for name, own in (ranks or devices).items()}
        self.waits = Waits(self.restart)
        self._shares: tuple[int, ...] = ()
        self._sources: Mapping[str, tuple[tuple[int, ...], int]] = {}
        self._capture_ranks: dict[str, int] = {}  # by spot worker: the rank that copies the verifier weights for it
        self._draft_ids: ObjectRef | None = None  # the tokens that drafters draft, where the run has chosen them

    def calibrate(self) -> LatencyTable:
        """As `Servers.calibrate`, once spot workers have started: their imports would be measured, too."""
        if self.spot.config.speculation.calibrate:
            ready = [w.__ray_ready__.remote() for r in self.spot_workers.values() for w in r.handles.values()]
            if ready:
                ray.wait(ready, num_returns=len(ready), timeout=START_S)
        return super().calibrate()

    # ------------------------------------------------------------------ the actor

    def start_spot(self, aux_layers: Sequence[int], resume_from: Path | None, counts_tokens: bool) -> str | None:
        """Install the tap and start spot workers; returns None, or one sentence why there is no tap.

        `counts_tokens`: the first rollout's tokens are counted, for `choose_tokens`.
        """
        tables = {group.id: ray.util.placement_group_table(group) for group, _ in self._bundles}
        nodes = [str(tables[group.id]["bundles_to_node_id"][i]) for group, i in self._bundles]  # of each rank
        replicas = self.spot_workers.values()
        ranks = {name: rank for r in replicas for name, rank in zip(r.names(), r.ranks, strict=True)}
        self._capture_ranks = capture_ranks(ranks, nodes)
        capture = set(self._capture_ranks.values())
        setup = self.actor.tlt_setup(self.spot.config, list(aux_layers), capture, counts_tokens)
        ready: list[TapReady] = answer(setup, CALL_S)
        if untapped := next((r.untapped for r in ready if r.untapped), None):
            return untapped
        self._shares, self._sources = route([r.group for r in ready], ranks)
        for replica in replicas:
            replica.begin(self._new_workers(replica))
        if resume_from is not None:
            for replica_name, states in self._on_workers("resume", "resume", str(resume_from)).items():
                for name, state in zip(self.spot_workers[replica_name].names(), states, strict=True):
                    facts = state or "it holds no training"
                    logger.info("spot worker %s goes on from %s: %s", name, resume_from, facts)
        return None

    def take(self, train_next: bool, tokens: int) -> list[TappedStates]:
        """What the tap captured of the last old-log-prob forward, on each rank of the actor.

        With `train_next` the next weight sync brings the verifier weights; `tokens` are to be captured for each worker
        in the next forward.
        """
        ranks = set(self._capture_ranks.values()) if train_next else set()
        taken: list[TappedStates] = answer(self.actor.tlt_take(self._shares, ranks, tokens), CALL_S)
        return taken

    def choose_tokens(self, draft_ids: np.ndarray) -> None:
        """From the next hand-over on drafters draft these tokens, int64 [DV]; so do workers that start later."""
        self._draft_ids = ray.put(draft_ids)

    def hand_over(self, step: int, taken: Sequence[TappedStates]) -> dict[str, Call[BufferStats]]:
        """Send what was taken to the spot workers; does not wait for the copies."""
        under_way: dict[str, Call[BufferStats]] = {}
        for replica in self.workers():
            workers = self.spot_workers[replica]
            if workers.starting():
                logger.info("the spot workers of %s are still starting; they get the next step's states", replica)
                continue
            calls = {}
            for name, worker in workers.handles.items():
                ranks, share = self._sources[name]
                shards = [taken[rank].shards[share] for rank in ranks]
                weights = taken[self._capture_ranks[name]].verifier_weights
                if weights is not None:  # the same ones would only be loaded again
                    given, workers.given[name] = workers.given.get(name), weights.hex()
                    weights = None if given == workers.given[name] else weights
                calls[name] = worker.add.remote(step, [shards], weights, self._draft_ids)
            under_way[replica] = workers.sent(calls, BufferStats.combined)
        return under_way

    # ------------------------------------------------------------------ starting and replacing spot workers

    def workers(self) -> list[str]:
        return [name for name, workers in self.spot_workers.items() if workers.handles]

    @cached_property
    def _bundles(self) -> list[tuple[PlacementGroup, int]]:
        return [(group, i) for group in self.pool.get_placement_groups() for i in range(group.bundle_count)]

    def _new_workers(
        self, replica: ReplicaWorkers, versions: ObjectRef | None = None, published: ObjectRef | None = None
    ) -> dict[str, ActorHandle]:
        """Start a replica's spot workers; `versions` or `published` for such that replace others (`SpotLearner`)."""
        plan = {**vars(self.spot), "drafter": self._first_drafter, "versions": versions, "published": published}
        plan["draft_ids"] = self._draft_ids
        share = get_platform().ray_resource_options(1.0 / self.pool.max_colocate_count)
        made = {}
        for name, rank in zip(replica.names(), replica.ranks, strict=True):
            group, index = self._bundles[rank]
            placed = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            actor = ray.remote(SpotWorker).options(scheduling_strategy=placed, num_cpus=0, **share)
            made[name] = actor.remote(name=name, **plan)
        return made

    @cached_property
    def _first_drafter(self) -> ObjectRef:
        """One copy in the object store for however many workers."""
        return ray.put(self.spot.drafter)

    def restart(self, names: Collection[str]) -> None:
        """Kill these replicas' spot workers and start others in their places; does not wait for them.

        A new worker starts from the versions that the others hold, or else its changes would be measured from another
        candidate than theirs; without others, from what was published last.
        """
        others = [self.spot_workers[name] for name in self.workers() if name not in names]
        source = min(others, key=ReplicaWorkers.starting, default=None)  # rather one that is up
        for name in names:
            workers = self.spot_workers[name]
            versions = source.first().versions.remote() if source is not None else None
            gone = workers.handles
            # In its place before it dies: another thread that waits for it must not replace it once more.
            workers.begin(self._new_workers(workers, versions, None if others else self.published))
            for worker in gone.values():
                ray.kill(worker)
            workers.restarts += 1
            logger.warning("the spot workers of %s were replaced (%d times so far)", name, workers.restarts)

    def unrehearsed(self, *, up: bool = False) -> list[str]:
        """Replicas whose spot workers have not warmed up; with `up` those alone that have started.

        None on a CPU, where there is nothing to warm up.
        """
        new = {name: self.spot_workers[name] for name in self.workers() if self.spot.device != "cpu"}
        return [name for name, w in new.items() if not w.rehearsed and not (up and w.starting())]

    def warm_up(self, names: Collection[str]) -> dict[str, Call[list]]:
        for name in names:
            self.spot_workers[name].rehearsed = True
        return {name: self.spot_workers[name].call("warm_up", list) for name in names}

    # ------------------------------------------------------------------ sessions

    def train(self, name: str) -> Call[SessionResult]:
        return self.spot_workers[name].call("train", SessionResult.combined)

    def stop(self, name: str) -> None:
        """Ask a replica's spot workers to end after their micro-batch; does not wait."""
        for worker in self.spot_workers[name].handles.values():
            worker.stop.remote()

    def first_done(self, calls: Mapping[str, Call[SessionResult]], timeout_s: float) -> list[str]:
        """Wait until at least one of these calls is done; returns all that are, or none after `timeout_s` seconds."""
        deadline = Deadline(timeout_s)
        references = [reference for call in calls.values() for reference in call.references]
        while references:  # one question for all of them: a call each would cost a large fleet seconds a look
            ready, waiting = ray.wait(references, num_returns=len(references), timeout=0)
            answered, left = set(ready), deadline.left()
            if (done := [name for name, call in calls.items() if answered.issuperset(call.references)]) or left <= 0:
                return done
            ray.wait(waiting, num_returns=1, timeout=left)
        return []

    # ------------------------------------------------------------------ versions of the drafter

    def merge(self, names: Sequence[str]) -> MergeFacts:
        """Average what the workers of these replicas learned; every worker adopts the result as the new candidate."""
        taking_part = [self.spot_workers[name] for name in names]
        facts, slices = start_merge([worker for workers in taking_part for worker in workers.handles.values()])
        up = [worker for workers in taking_part for worker in workers.up()]
        call: Call[MergeFacts] = Call(facts, lambda answers: answers[0], up)  # by slice, all alike
        try:
            merged = call.result(CALL_S)
        except CallFailed as error:
            signs = {name: call for name, call in self._call_workers("__ray_ready__").items() if name in names}
            alive = self.waits.answers("merge", signs, SILENT_S)
            if error.silent and alive.keys() == signs.keys():  # one of them hangs, and holds what it would train
                self.waits.failed("merge", signs, dict.fromkeys(signs, error))
            raise
        self._on_workers("merge", "adopt", *slices)
        return merged

    def keep_as_served(self) -> None:
        """What was exported is published: every worker marks it as the served version.

        The weight sync waits for this, so workers that are still starting do so when they can.
        """
        calls = self._call_workers("mark_published")
        self.waits.answers("publish", {name: call for name, call in calls.items() if not call.excused()}, SILENT_S)

    def revert(self, which: Literal["served", "initial"]) -> None:
        self._on_workers("revert", "revert", which)

    def export(self, version: int, dtype: str, acceptance: Sequence[float]) -> DrafterFile | None:
        """The candidate as engines load it; None: its numbers are not finite in that dtype.

        One worker writes it, for all hold the same; where it fails another one does. It holds Python's lock while it
        packs and pickles the file, for seconds with some gigabytes, and gives no sign of life.
        """
        self._on_workers("export", "mark_exported")
        for name in sorted(self.workers(), key=lambda name: self.spot_workers[name].starting()):
            workers = self.spot_workers[name]
            call = workers.first().export.remote(version, dtype, list(acceptance))
            sent: Call[DrafterFile | None] = workers.sent({name: call}, lambda answers: answers[0], signs=False)
            if files := self.waits.answers("export", {name: sent}, CALL_S, keep=True):
                return files[name]
        raise CallFailed("no spot worker exported the drafter")

    def save(self, directory: Path, provenance: DrafterProvenance, *places: Path) -> dict[str, Call[None]]:
        """Write the served drafter and its training state, atomically: that of the worker that trained the longest.

        `places` are `SpotLearner.save`'s. Returns the worker's replica, and the call.
        """
        directory.parent.mkdir(parents=True, exist_ok=True)
        calls = {name: call for name, call in self._call_workers("steps").items() if not call.excused()}
        steps = self.waits.answers("save", calls, SILENT_S)
        trained = {(replica, i): count for replica, counts in steps.items() for i, count in enumerate(counts)}
        if not trained:
            raise CallFailed("no spot worker is there to write the drafter")
        replica, i = max(trained, key=trained.__getitem__)
        workers = self.spot_workers[replica]
        name, (target, *others) = list(workers.handles)[i], [str(path.absolute()) for path in (directory, *places)]
        call = workers.handles[name].save.remote(target, provenance, *others)
        return {replica: workers.sent({name: call}, lambda _: None)}

    def _call_workers(self, method: str, *args: object) -> dict[str, Call[list]]:
        return {name: self.spot_workers[name].call(method, list, *args) for name in self.workers()}

    def _on_workers(self, during: str, method: str, *args: object) -> dict[str, list]:
        """Call every spot worker and wait; the results by replica."""
        return self.waits.answers(during, self._call_workers(method, *args), CALL_S)


def route(
    groups: Sequence[int], workers: Mapping[str, int]
) -> tuple[tuple[int, ...], dict[str, tuple[tuple[int, ...], int]]]:
    """Share each group's sequences among the workers on its ranks' devices.

    `groups` has for each rank the number of its group (verl's data-parallel rank), `workers` each worker's rank.
    Returns for each rank among how many workers its group's sequences are shared; for each worker the ranks of its
    group, and which share of theirs it gets.
    """
    shares = Counter[int]()
    sources = {}
    for name, rank in workers.items():
        group = groups[rank]
        sources[name] = (tuple(r for r, other in enumerate(groups) if other == group), shares[group])
        shares[group] += 1
    return tuple(max(1, shares[group]) for group in groups), sources


def capture_ranks(workers: Mapping[str, int], nodes: Sequence[str]) -> dict[str, int]:
    """For each worker the rank that copies the verifier weights for it: the same one for all workers of a node.

    `workers` has each worker's rank, `nodes` each rank's node.
    """
    first: dict[str, int] = {}
    return {name: first.setdefault(nodes[rank], rank) for name, rank in workers.items()}
