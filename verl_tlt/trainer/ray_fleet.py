"""The fleet as Ray actors: verl's rollout servers, balancer and actor, and spot workers on the actor's devices.

Each device of a colocated replica has a spot worker, for all of them are idle when the replica is. It shares a bundle
with the actor's rank there (verl's workers take a third of a GPU each), so it sees the same device and dies with the
job. It is created directly rather than as a worker group, because it must be possible to kill and restart one alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.plugin.platform.platform_manager import get_platform

from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import Calibration, DrafterFile, DrafterStatus, EngineStats
from verl_tlt.messages.training import (
    BufferStats,
    DrafterProvenance,
    MergeFacts,
    RolloutSampling,
    SessionResult,
    TappedStates,
)
from verl_tlt.spot_worker.worker import SpotWorker
from verl_tlt.trainer.crew import CrewCall, one_buffer, one_session
from verl_tlt.trainer.fleet import Call, CallFailed, Place
from verl_tlt.trainer.merge_tree import start_merge
from verl_tlt.trainer.ray_call import RayCall, answer
from verl_tlt.trainer.routes import Routes, captors, route

logger = logging.getLogger(__name__)

CALL_S = 120.0
"""For calls that take seconds at most: a longer one means the actor is gone."""
ANSWER_S = 1.0
"""For bringing here what is there, when others have used up the time."""
KEEP_S = 5.0
"""For telling spot workers what is served: microseconds of work, for which everybody waits."""
START_S = 300.0
"""A spot worker's successor on a busy node is up by then; until then nobody waits for it, nor takes it for silent."""
SLEEP_S = 30.0
"""Sleeping takes milliseconds to seconds; the end of sampling waits at most this for a hung server."""
CALIBRATION_S = 1200.0
"""An engine that warms up and captures graphs while it is measured."""


@dataclass(frozen=True)
class SpotPlan:
    """How spot workers are made: once at the start, and again for one that died."""

    config: TLTConfig
    policy_dir: str
    """Visible on every node."""
    drafter: DrafterFile
    """The first one, float32."""
    sampling: RolloutSampling
    device: str


@dataclass
class _Replica:
    place: Place
    server: Any
    """Handle of the server that owns the engine."""
    servers: Sequence[Any]
    """Handles of its servers on all nodes."""
    ranks: Sequence[int] = ()
    """Its ranks of the actor's worker group: on the device of each, a spot worker."""
    crew: dict[str, Any] = field(default_factory=dict)
    """Handles of its spot workers by name, as many as ranks and in their order."""
    restarts: int = field(default=0)

    @property
    def worker(self) -> Any:
        """Handle of one of them, where one is enough; all hold the same version."""
        return next(iter(self.crew.values()))

    def names(self) -> list[str]:
        """Its spot workers' names."""
        return [self.place.name if i == 0 else f"{self.place.name}/{i}" for i in range(len(self.ranks))]


class RayFleet:
    """See `fleet.Fleet`.

    Args:
        llm_server_manager: verl's, of the replicas that share devices with the actor.
        actor: verl's worker group of the actor.
        store: handle of the run's `DrafterStore`.
        pool: verl's RayResourcePool of the actor's devices.
        spot: how spot workers are made.
        standalone: verl's manager of replicas on devices of their own, whose balancer then serves everybody.
    """

    def __init__(
        self, llm_server_manager: Any, actor: Any, store: Any, pool: Any, spot: SpotPlan, standalone: Any = None
    ) -> None:
        colocated = llm_server_manager.get_replicas()
        width = max(1, actor.world_size // max(1, len(colocated)))
        self.balancer = (standalone or llm_server_manager).global_load_balancer
        self.actor, self.store, self.pool, self.spot = actor, store, pool, spot
        self.replicas: dict[str, _Replica] = {}
        for i, replica in enumerate(colocated):
            self._add(replica, range(i * width, (i + 1) * width))
        for replica in standalone.get_replicas() if standalone else ():
            self._add(replica, ())
        self._routes = Routes((), {})
        self._captors: dict[str, int] = {}  # by replica: the rank that copies the verifier weights for it
        self._starting: dict[str, tuple[Any, float]] = {}  # by spot worker: what is there when it is up, and since when
        self._published: Any = None  # ObjectRef of the latest published drafter; the driver owns the copy

    def _add(self, replica: Any, ranks: Sequence[int]) -> None:
        name = replica._server_address
        place = Place(name, colocated=bool(ranks), devices=max(1, len(ranks)))
        self.replicas[name] = _Replica(place, replica._server_handle, list(replica.servers), ranks)

    @property
    def places(self) -> Mapping[str, Place]:
        """Replicas by name."""
        return {name: r.place for name, r in self.replicas.items()}

    # ------------------------------------------------------------------ rollout servers and their balancer

    def inflight(self) -> dict[str, int]:
        """See `Fleet`. Asked many times a second, so Ray keeps no record of it (else 4 KB a call)."""
        status = self.balancer.get_status.options(enable_task_events=False).remote()
        found: dict[str, int] = answer(status, CALL_S)["servers"]
        return found

    def leave(self, name: str) -> None:
        """See `Fleet`."""
        answer(self.balancer.remove_servers.remote([name]), CALL_S)

    def join(self, names: Collection[str]) -> None:
        """See `Fleet`."""
        present = self.inflight()
        if missing := {name: self.replicas[name].server for name in names if name not in present}:
            answer(self.balancer.add_servers.remote(missing), CALL_S)

    def try_sleep(self, name: str, keep_weights: bool) -> bool:
        """See `Fleet`."""
        return bool(answer(self.replicas[name].server.tlt_try_sleep.remote(keep_weights), SLEEP_S))

    def wake_up(self, name: str) -> None:
        """See `Fleet`."""
        answer(self.replicas[name].server.tlt_recall.remote(), SLEEP_S)

    def disable_drafting(self, names: Collection[str], at_once: bool) -> None:
        """See `Fleet`."""
        servers = {name: r.server for name, r in self.replicas.items()}
        answer([s.tlt_disable_drafting.remote(name in names, at_once) for name, s in servers.items()], CALL_S)

    def stage(self, drafter: DrafterFile) -> None:
        """See `Fleet`."""
        reference = ray.put(drafter)
        try:
            answer([server.tlt_stage.remote(reference) for server in self._servers()], CALL_S)
        except CallFailed:
            if self._published is not None:  # those that have taken it go back to what the others serve
                [server.tlt_stage.remote(self._published) for server in self._servers()]
            raise
        self._published = reference
        self.store.put.remote(reference)

    def drafter_statuses(self) -> dict[str, DrafterStatus]:
        """See `Fleet`."""
        return self._on_servers("tlt_status")

    def engine_stats(self) -> dict[str, EngineStats]:
        """See `Fleet`."""
        return {name: stats for name, stats in self._on_servers("tlt_stats").items() if stats is not None}

    def calibrate(self) -> Calibration:
        """See `Fleet`. Replicas of a run are alike, so one table serves them."""
        # What spot workers import and load while they start would be measured, too.
        answer([worker.__ray_ready__.remote() for worker in self._crews().values()], CALIBRATION_S)
        first, *others = self.replicas.values()
        found = answer(first.server.tlt_calibrate.remote(), CALIBRATION_S)
        answer([r.server.tlt_calibrate.remote(found) for r in others], CALL_S)
        logger.info("engine step costs measured in %.1f s: %s", found.seconds, found.latency)
        return cast(Calibration, found)

    def close(self) -> None:
        """See `Fleet`."""
        answer([server.tlt_close.remote() for server in self._servers()], SLEEP_S)

    def _servers(self) -> list[Any]:
        return [server for r in self.replicas.values() for server in r.servers]

    def _on_servers(self, method: str) -> dict[str, Any]:
        calls = {name: getattr(r.server, method).remote() for name, r in self.replicas.items()}
        return dict(zip(calls, answer(list(calls.values()), CALL_S), strict=True))

    # ------------------------------------------------------------------ actor

    def start_spot(self, aux_layers: Sequence[int], resume_from: Path | None) -> str | None:
        """See `Fleet`."""
        ranks = {name: [rank] for r in self.replicas.values() for name, rank in zip(r.names(), r.ranks, strict=True)}
        self._captors = captors(ranks, self._nodes())
        ready = self.actor.tlt_setup(self.spot.config, list(aux_layers), set(self._captors.values()))
        if untapped := next((r.untapped for r in ready if r.untapped), None):
            return str(untapped)
        self._routes = route([r.group for r in ready], ranks)
        for replica in self.replicas.values():
            replica.crew = self._new_crew(replica)
        if resume_from is not None:
            for name, found in self._on_workers("resume", str(resume_from)).items():
                logger.info("spot worker %s goes on from %s: %s", name, resume_from, found or "it holds no training")
        return None

    def take(self, train_next: bool, tokens: int) -> list[TappedStates]:
        """See `Fleet`."""
        ranks = set(self._captors.values()) if train_next else set()
        taken: list[TappedStates] = answer(self.actor.tlt_take(self._routes.shares, ranks, tokens), CALL_S)
        return taken

    def hand_over(self, step: int, taken: Sequence[TappedStates]) -> dict[str, Call[BufferStats]]:
        """See `Fleet`."""
        under_way: dict[str, Call[BufferStats]] = {}
        for replica in self.workers():
            calls = []
            if any(self._starts(name) for name in self.replicas[replica].crew):
                logger.info("the spot workers of %s are still starting; they get the next step's states", replica)
                continue
            for name, worker in self.replicas[replica].crew.items():
                shards = [[taken[rank].shards[share] for rank in ranks] for ranks, share in self._routes.sources[name]]
                weights = taken[self._captors[name]].verifier_weights
                calls.append(RayCall(worker.add.remote(step, shards, weights)))
            under_way[replica] = CrewCall(calls, one_buffer)
        return under_way

    # ------------------------------------------------------------------ spot workers

    def workers(self) -> list[str]:
        """See `Fleet`."""
        return [name for name, r in self.replicas.items() if r.crew]

    def _crews(self) -> dict[str, Any]:
        """All spot workers by name."""
        return {name: worker for r in self.replicas.values() for name, worker in r.crew.items()}

    @cached_property
    def _bundles(self) -> list[tuple[Any, int]]:
        return [(group, i) for group in self.pool.get_placement_groups() for i in range(group.bundle_count)]

    def _nodes(self) -> list[str]:
        """The node of each of the actor's ranks."""
        tables = {group.id: ray.util.placement_group_table(group) for group, _ in self._bundles}
        return [str(tables[group.id]["bundles_to_node_id"][i]) for group, i in self._bundles]

    def _new_crew(self, replica: _Replica, versions: Any = None, published: Any = None) -> dict[str, Any]:
        named = zip(replica.names(), replica.ranks, strict=True)
        return {name: self._new_worker(name, rank, versions, published) for name, rank in named}

    def _new_worker(self, name: str, rank: int, versions: Any, published: Any) -> Any:
        group, index = self._bundles[rank]
        placed = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        share = get_platform().ray_resource_options(1.0 / self.pool.max_colocate_count)
        options = {"scheduling_strategy": placed, "num_cpus": 0, **share}
        make: Callable[..., Any] = ray.remote(SpotWorker).options(**options).remote
        plan = {**vars(self.spot), "drafter": self._first_drafter}
        return make(name=name, versions=versions, published=published, **plan)

    @cached_property
    def _first_drafter(self) -> Any:
        """One copy in the object store for however many workers."""
        return ray.put(self.spot.drafter)

    def warm_up(self) -> dict[str, Call[Any]]:
        """See `Fleet`."""
        if self.spot.device == "cpu":
            return {}
        return {
            name: CrewCall([RayCall(worker.warm_up.remote()) for worker in self.replicas[name].crew.values()], list)
            for name in self.workers()
        }

    def train(self, name: str) -> Call[SessionResult]:
        """See `Fleet`."""
        return CrewCall([RayCall(worker.train.remote()) for worker in self.replicas[name].crew.values()], one_session)

    def stop(self, name: str) -> None:
        """See `Fleet`."""
        for worker in self.replicas[name].crew.values():
            worker.stop.remote()

    def restart(self, names: Collection[str]) -> None:
        """See `Fleet`.

        A new worker's buffer is empty until the next step, but it starts from what the others agree on, or else its
        changes would be measured from another version than theirs. Without others it starts from what was published
        last, which is what the engines serve.
        """
        others = {who: w for name, r in self.replicas.items() if name not in names for who, w in r.crew.items()}
        one = min(others, key=self._starts, default=None)  # rather one that is up
        for name in names:
            replica = self.replicas[name]
            versions = others[one].versions.remote() if one is not None else None
            # In its place before it dies: another thread that waits for it must not replace it once more.
            gone, replica.crew = replica.crew, self._new_crew(replica, versions, None if others else self._published)
            for worker in gone.values():
                ray.kill(worker)
            now = time.monotonic()
            self._starting |= {who: (worker.__ray_ready__.remote(), now) for who, worker in replica.crew.items()}
            replica.restarts += 1
            logger.warning("the spot workers of %s were killed and restarted (%d times so far)", name, replica.restarts)

    def _starts(self, worker: str) -> bool:
        ready, since = self._starting.get(worker, (None, 0.0))
        return ready is not None and time.monotonic() - since < START_S and not RayCall(ready).done()

    def first_done(self, calls: Mapping[str, Call[Any]], timeout_s: float) -> list[str]:
        """See `Fleet`."""
        deadline = time.monotonic() + timeout_s
        crews = {name: call.calls if isinstance(call, CrewCall) else [call] for name, call in calls.items()}
        of = {name: [c.reference for c in crew if isinstance(c, RayCall)] for name, crew in crews.items()}
        every = [reference for references in of.values() for reference in references]
        while every:  # one question for all of them: a call each would cost a large fleet seconds a look
            ready, waiting = ray.wait(every, num_returns=len(every), timeout=0)
            there, left = set(ready), deadline - time.monotonic()
            if (done := [name for name in calls if there.issuperset(of[name])]) or left <= 0:
                return done
            ray.wait(waiting, num_returns=1, timeout=left)
        return []

    def merge(self, names: Sequence[str]) -> MergeFacts:
        """See `Fleet`."""
        facts, slices = start_merge([worker for name in names for worker in self.replicas[name].crew.values()])
        try:
            merged: MergeFacts = answer(facts, CALL_S)[0]
        except CallFailed as error:
            if error.silent:  # one of them hangs, and holds what it would train
                self.restart(names)
            raise
        self._on_workers("adopt", *slices)
        return merged

    def keep_as_served(self) -> None:
        """See `Fleet`."""
        self._on_workers("mark_published", within_s=KEEP_S)

    def revert(self, which: str) -> None:
        """See `Fleet`."""
        self._on_workers("revert", which)

    def export(self, version: int, dtype: str, acceptance: Sequence[float]) -> DrafterFile | None:
        """See `Fleet`."""
        self._on_workers("mark_exported")
        worker = self.replicas[self.workers()[0]].worker
        exported: DrafterFile | None = answer(worker.export.remote(version, dtype, list(acceptance)), CALL_S)
        return exported

    def save(self, directory: Path, provenance: DrafterProvenance) -> Call[Any]:
        """See `Fleet`."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        worker = self.replicas[self.workers()[0]].worker
        return RayCall(worker.save.remote(str(directory.absolute()), provenance))

    def _on_workers(self, method: str, *args: Any, within_s: float | None = None) -> dict[str, Any]:
        """Call every spot worker and wait; the result by worker. A replica of which one died or hangs is restarted.

        Raises:
            CallFailed: one of them raised; its state may no longer be the others'.
        """
        crews = {name: r.crew for name, r in self.replicas.items()}
        calls = {name: getattr(worker, method).remote(*args) for name, worker in self._crews().items()}
        done, gone = {}, set()
        deadline = time.monotonic() + (CALL_S if within_s is None else within_s)
        for name, reference in calls.items():
            try:
                done[name] = answer(reference, max(ANSWER_S, deadline - time.monotonic()))
            except CallFailed as error:
                if error.silent and (within_s is not None or self._starts(name)):
                    continue  # it will do so when it can; one that hangs is found out when it is given something
                if not (error.died or error.silent):
                    raise
                logger.warning("spot worker of %s died: %s", name, error)
                gone.add(next(replica for replica, crew in crews.items() if name in crew))
        # The trainer's thread may have replaced one meanwhile.
        self.restart(sorted(name for name in gone if self.replicas[name].crew is crews[name]))
        return done
