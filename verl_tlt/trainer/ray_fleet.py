"""The fleet as Ray actors: verl's rollout servers, balancer and actor, and spot workers on the actor's devices.

A spot worker shares a bundle with the actor's rank on its device (verl's workers take a third of a GPU each), so it has
the same device and dies with the job. It is a plain actor rather than part of a worker group, because it must be
possible to kill and restart one alone. Every call is bounded: it answers, or it raises `CallFailed`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.plugin.platform.platform_manager import get_platform

from verl_tlt.messages.rollout import DrafterFile, DrafterStatus, EngineStats
from verl_tlt.messages.training import BufferStats, DrafterProvenance, MergeFacts, SessionResult, TappedStates
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.spot_worker.worker import SpotWorker
from verl_tlt.trainer.clock import Deadline
from verl_tlt.trainer.fleet import Call, CallFailed, ReplicaInfo, SpotPlan
from verl_tlt.trainer.ray_calls import CombinedCall, RayCall, answer, ask
from verl_tlt.trainer.replica_workers import (
    START_S,
    ReplicaWorkers,
    ShardRoutes,
    capture_ranks,
    combined_buffers,
    combined_session,
    route,
    start_merge,
)
from verl_tlt.trainer.waits import BEAR_S, Waits

if TYPE_CHECKING:
    import numpy as np
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup
    from verl.single_controller.base import WorkerGroup
    from verl.single_controller.ray import RayResourcePool
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplica

logger = logging.getLogger(__name__)

CALL_S = 120.0
"""For calls that take seconds at most: a longer one means the actor is gone."""
SLEEP_S = 30.0
"""Sleeping takes milliseconds to seconds; the end of sampling waits at most this for a hung server."""
CALIBRATION_S = 1200.0
"""An engine that warms up and captures graphs while it is measured."""


@dataclass(frozen=True, kw_only=True)
class RayReplica(ReplicaInfo):
    """One rollout replica, its servers and its spot workers."""

    server: ActorHandle
    """The one that owns the engine."""
    servers: Sequence[ActorHandle]
    """On all nodes."""
    workers: ReplicaWorkers


class RayFleet:
    """Replicas by name, and the calls to servers, balancer, actor and spot workers.

    `store` is the run's `DrafterStore`, `pool` has the actor's devices. With `standalone`, its balancer serves all.
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
        colocated = llm_server_manager.get_replicas()
        width = max(1, actor.world_size // max(1, len(colocated)))
        self.balancer = (standalone or llm_server_manager).global_load_balancer
        self.actor, self.store, self.pool, self.spot = actor, store, pool, spot
        self.replicas: dict[str, RayReplica] = {}
        for i, replica in enumerate(colocated):
            self._add(replica, range(i * width, (i + 1) * width))
        for replica in standalone.get_replicas() if standalone else ():
            self._add(replica, ())
        self._routes = ShardRoutes((), {})
        self._capture_ranks: dict[str, int] = {}  # by spot worker: the rank that copies the verifier weights for it
        self.waits = Waits(self.restart)
        self._published: ObjectRef | None = None  # the latest published drafter; the driver owns the copy
        self._draft_ids: ObjectRef | None = None  # the tokens that drafters draft, where the run has chosen them

    def _add(self, replica: RolloutReplica, ranks: Sequence[int]) -> None:
        name = replica._server_address
        self.replicas[name] = RayReplica(
            name=name, colocated=bool(ranks), devices=max(1, len(ranks)), server=replica._server_handle,
            servers=list(replica.servers), workers=ReplicaWorkers(name, ranks),
        )  # fmt: skip

    # ------------------------------------------------------------------ rollout servers and their balancer

    def inflight(self) -> dict[str, int]:
        """Requests in flight by replica, of those that are in the load balancer."""
        # Asked many times a second, so Ray is to keep no record of it (4 KB a call).
        status = self.balancer.get_status.options(enable_task_events=False).remote()
        found: dict[str, int] = ask(status, CALL_S)["servers"]
        return found

    def leave(self, name: str) -> None:
        """Take a replica out of the load balancer."""
        ask(self.balancer.remove_servers.remote([name]), CALL_S)

    def rejoin(self, names: Collection[str]) -> None:
        """Put replicas back into the load balancer; those that are in it already stay as they are."""
        present = self.inflight()
        if missing := {name: self.replicas[name].server for name in names if name not in present}:
            ask(self.balancer.add_servers.remote(missing), CALL_S)

    def try_sleep(self, name: str, keep_weights: bool) -> bool:
        """Have a server sleep if nothing runs on it and nothing is on its way; False: it serves on.

        Where this raises, its gate may be closed: it serves again after the next weight sync.
        """
        return bool(ask(self.replicas[name].server.tlt_try_sleep.remote(keep_weights), SLEEP_S))

    def wake_up(self, name: str) -> None:
        """Have a server that sleeps with its weights serve again."""
        ask(self.replicas[name].server.tlt_recall.remote(), SLEEP_S)

    def disable_drafting(self, names: Collection[str], at_once: bool) -> None:
        """These replicas, and no others, decode without drafts from the next weight sync on, or from now on."""
        servers = {name: r.server for name, r in self.replicas.items()}
        ask([s.tlt_disable_drafting.remote(name in names, at_once) for name, s in servers.items()], CALL_S)

    def stage(self, drafter: DrafterFile) -> None:
        """Hand a published drafter to every server on every node, and to servers that start later."""
        reference = ray.put(drafter)
        try:
            ask([server.tlt_stage.remote(reference) for server in self._servers()], CALL_S)
        except CallFailed:
            before = self._published or self.store.latest.remote()  # those that have taken it go back to that
            for server in self._servers():
                server.tlt_stage.remote(before)
            raise
        self._published = reference
        self.store.put.remote(reference)

    def drafter_statuses(self) -> dict[str, DrafterStatus]:
        """Which drafter each engine has loaded."""
        return self._on_servers("tlt_status")

    def engine_stats(self) -> dict[str, EngineStats]:
        """What each engine did since it was last asked."""
        return self._on_servers("tlt_stats")

    def calibrate(self) -> LatencyTable:
        """Measure on one replica what engine steps cost, and tell all of them: replicas of a run are alike.

        With `tlt.speculation.calibrate=false` a stored table is looked up instead, which takes no time.
        """
        # What spot workers import and load while they start would be measured, too.
        replicas = self.replicas.values() if self.spot.config.speculation.calibrate else ()
        handles = [worker for r in replicas for worker in r.workers.handles.values()]
        ready = [worker.__ray_ready__.remote() for worker in handles]
        if ready:
            ray.wait(ready, num_returns=len(ready), timeout=START_S)
        first, *others = self.replicas.values()
        found: LatencyTable = ask(first.server.tlt_calibrate.remote(), CALIBRATION_S)
        # Where the first could not, its engine died of the drafter, and the others' do as well.
        ask([r.server.tlt_calibrate.remote(found) for r in others], CALL_S if found.points else CALIBRATION_S)
        logger.info("engine step costs: %s", found)
        return found

    def close(self) -> None:
        """The run is over: every server, on every node, ends its engine and clears away what it put there."""
        self.waits.close()
        answer([server.tlt_close.remote() for server in self._servers()], SLEEP_S)

    def _servers(self) -> list[ActorHandle]:
        return [server for r in self.replicas.values() for server in r.servers]

    def _on_servers(self, method: str) -> dict:
        calls = {name: getattr(r.server, method).remote() for name, r in self.replicas.items()}
        return dict(zip(calls, ask(list(calls.values()), CALL_S), strict=True))

    # ------------------------------------------------------------------ actor

    def start_spot(
        self, aux_layers: Sequence[int], resume_from: Path | None, counts_tokens: bool = False
    ) -> str | None:
        """Install the tap and start spot workers; returns None, or one sentence why there is no tap.

        `counts_tokens`: the first rollout's tokens are counted, for `choose_tokens`.
        """
        tables = {group.id: ray.util.placement_group_table(group) for group, _ in self._bundles}
        nodes = [str(tables[group.id]["bundles_to_node_id"][i]) for group, i in self._bundles]  # of each rank
        replicas = [r.workers for r in self.replicas.values()]
        ranks = {name: rank for r in replicas for name, rank in zip(r.names(), r.ranks, strict=True)}
        self._capture_ranks = capture_ranks(ranks, nodes)
        capture = set(self._capture_ranks.values())
        ready = self.actor.tlt_setup(self.spot.config, list(aux_layers), capture, counts_tokens)
        if untapped := next((r.untapped for r in ready if r.untapped), None):
            return str(untapped)
        self._routes = route([r.group for r in ready], ranks)
        for replica in replicas:
            replica.begin(self._new_workers(replica))
        if resume_from is not None:
            for replica_name, held in self._on_workers("resume", "resume", str(resume_from)).items():
                for name, found in zip(self.replicas[replica_name].workers.names(), held, strict=True):
                    said = found or "it holds no training"
                    logger.info("spot worker %s goes on from %s: %s", name, resume_from, said)
        return None

    def take(self, train_next: bool, tokens: int) -> list[TappedStates]:
        """What the tap captured of the last old-log-prob forward, on each rank of the actor.

        With `train_next` the next weight sync brings the verifier weights; `tokens` are to be captured for each worker
        in the next forward.
        """
        ranks = set(self._capture_ranks.values()) if train_next else set()
        taken: list[TappedStates] = answer(self.actor.tlt_take(self._routes.shares, ranks, tokens), CALL_S)
        return taken

    def choose_tokens(self, draft_ids: np.ndarray) -> None:
        """From the next hand-over on drafters draft these tokens, int64 [DV]; so do workers that start later."""
        self._draft_ids = ray.put(draft_ids)

    def hand_over(self, step: int, taken: Sequence[TappedStates]) -> dict[str, Call[BufferStats]]:
        """Send what was taken to the spot workers; does not wait for the copies."""
        under_way: dict[str, Call[BufferStats]] = {}
        for replica in self.workers():
            workers = self.replicas[replica].workers
            if workers.starting():
                logger.info("the spot workers of %s are still starting; they get the next step's states", replica)
                continue
            calls = {}
            for name, worker in workers.handles.items():
                ranks, share = self._routes.sources[name]
                shards = [taken[rank].shards[share] for rank in ranks]
                weights = taken[self._capture_ranks[name]].verifier_weights
                calls[name] = worker.add.remote(step, [shards], weights, self._draft_ids)
            under_way[replica] = workers.sent(calls, combined_buffers)
        return under_way

    # ------------------------------------------------------------------ spot workers

    def workers(self) -> list[str]:
        """Replicas that have spot workers. The other methods address all of a replica's workers by its name."""
        return [name for name, r in self.replicas.items() if r.workers.handles]

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

    def unrehearsed(self, *, up: bool = False) -> list[str]:
        """Replicas whose spot workers have not warmed up, and would do it in a session; `up`: but for those starting.

        On a CPU there is nothing to warm up.
        """
        new = {name: self.replicas[name].workers for name in self.workers() if self.spot.device != "cpu"}
        return [name for name, w in new.items() if not w.rehearsed and not (up and w.starting())]

    def warm_up(self, names: Collection[str]) -> dict[str, Call[object]]:
        """Have these replicas' spot workers rehearse on their devices."""
        for name in names:
            self.replicas[name].workers.rehearsed = True
        return {name: self.replicas[name].workers.call("warm_up", list) for name in names}

    def train(self, name: str) -> Call[SessionResult]:
        """Start a session on a replica's spot workers."""
        return self.replicas[name].workers.call("train", combined_session)

    def stop(self, name: str) -> None:
        """Ask them to end after their micro-batch; does not wait."""
        for worker in self.replicas[name].workers.handles.values():
            worker.stop.remote()

    def restart(self, names: Collection[str]) -> None:
        """Kill these replicas' spot workers and start others in their places; does not wait for them.

        A new worker starts from the versions that the others hold, or else its changes would be measured from another
        candidate than theirs; without others, from what was published last.
        """
        others = [r.workers for n, r in self.replicas.items() if n not in names and r.workers.handles]
        one = min(others, key=ReplicaWorkers.starting, default=None)  # rather one that is up
        for name in names:
            workers = self.replicas[name].workers
            versions = one.first().versions.remote() if one is not None else None
            gone = workers.handles
            # In its place before it dies: another thread that waits for it must not replace it once more.
            workers.begin(self._new_workers(workers, versions, None if others else self._published))
            for worker in gone.values():
                ray.kill(worker)
            workers.restarts += 1
            logger.warning("the spot workers of %s were replaced (%d times so far)", name, workers.restarts)

    def first_done(self, calls: Mapping[str, Call[SessionResult]], timeout_s: float) -> list[str]:
        """Wait until at least one of these calls is done; those that are, or none after `timeout_s` seconds."""
        deadline = Deadline(timeout_s)
        of = {name: call.references for name, call in calls.items() if isinstance(call, CombinedCall)}
        every = [reference for references in of.values() for reference in references]
        while every:  # one question for all of them: a call each would cost a large fleet seconds a look
            ready, waiting = ray.wait(every, num_returns=len(every), timeout=0)
            there, left = set(ready), deadline.left()
            if (done := [name for name, own in of.items() if there.issuperset(own)]) or left <= 0:
                return done
            ray.wait(waiting, num_returns=1, timeout=left)
        return []

    def merge(self, names: Sequence[str]) -> MergeFacts:
        """Average what these workers learned, and have all workers adopt the result as the new candidate."""
        taking_part = {name: self.replicas[name].workers for name in names}
        facts, slices = start_merge([worker for r in taking_part.values() for worker in r.handles.values()])
        try:
            merged = RayCall[MergeFacts](facts[0], [w for r in taking_part.values() for w in r.up()]).result(CALL_S)
        except CallFailed as error:
            signs = {name: call for name, call in self._call_workers("__ray_ready__").items() if name in names}
            alive = self.waits.answers("merge", signs, BEAR_S)
            if error.silent and alive.keys() == signs.keys():  # one of them hangs, and holds what it would train
                self.waits.failed("merge", signs, dict.fromkeys(signs, error))
            raise
        self._on_workers("merge", "adopt", *slices)
        return merged

    def keep_as_served(self) -> None:
        """What was exported is published: every worker marks it as the served version.

        The weight sync waits, so those that are starting do so when they can.
        """
        calls = self._call_workers("mark_published")
        self.waits.answers("publish", {name: call for name, call in calls.items() if not call.excused()}, BEAR_S)

    def revert(self, which: Literal["served", "initial"]) -> None:
        """Every worker goes back to the served or the initial drafter."""
        self._on_workers("revert", "revert", which)

    def export(self, version: int, dtype: str, acceptance: Sequence[float]) -> DrafterFile | None:
        """The candidate as engines load it; None: its numbers are not finite in that dtype.

        One worker writes it, for all hold the same; where it fails another one does.
        """
        self._on_workers("export", "mark_exported")
        for name in sorted(self.workers(), key=lambda name: self.replicas[name].workers.starting()):
            workers = self.replicas[name].workers
            call = workers.first().export.remote(version, dtype, list(acceptance))
            sent: CombinedCall[DrafterFile | None] = workers.sent({name: call}, lambda answers: answers[0])
            if found := self.waits.answers("export", {name: sent}, CALL_S, keep=True):
                return found[name]
        raise CallFailed("no spot worker exported the drafter")

    def save(self, directory: Path, provenance: DrafterProvenance, beside: Path | None = None) -> dict[str, Call[None]]:
        """Write the served drafter and its training state, atomically: that of the worker that trained the longest.

        `beside` is a checkpoint of the policy (`SpotLearner.save`). Returns the worker's replica, and the call.
        """
        directory.parent.mkdir(parents=True, exist_ok=True)
        calls: dict[str, Call[list[int]]] = {n: c for n, c in self._call_workers("steps").items() if not c.excused()}
        steps = self.waits.answers("save", calls, BEAR_S)
        every = [(count, replica, i) for replica, counts in steps.items() for i, count in enumerate(counts)]
        if not every:
            raise CallFailed("no spot worker is there to write the drafter")
        _, replica, i = max(every, key=lambda one: one[0])
        workers = self.replicas[replica].workers
        name = list(workers.handles)[i]
        place = None if beside is None else str(beside.absolute())
        call = workers.handles[name].save.remote(str(directory.absolute()), provenance, place)
        return {replica: workers.sent({name: call}, lambda _: None)}

    def _call_workers(self, method: str, *args: object) -> dict[str, CombinedCall[list[Any]]]:
        """Call every spot worker; by replica."""
        return {name: self.replicas[name].workers.call(method, list, *args) for name in self.workers()}

    def _on_workers(self, during: str, method: str, *args: object) -> dict[str, list[Any]]:
        """Call every spot worker and wait, in the background; the results by replica."""
        return self.waits.answers(during, self._call_workers(method, *args), CALL_S)
