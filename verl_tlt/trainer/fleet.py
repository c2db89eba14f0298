"""Every Ray actor the trainer talks to: rollout servers, and one spot worker per replica in verl's own placement group.

A spot worker shares its replica's first bundle (verl's workers take a third of a GPU each), so it sees the same
device and dies with the job. It is created directly rather than as a worker group, because it must be possible to
kill and restart one alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.plugin.platform.platform_manager import get_platform

from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.spot_worker.worker import SpotWorker

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 120.0  # for calls that take seconds at most: a longer one means the actor is gone


@dataclass
class Replica:
    """One rollout replica as the trainer sees it."""

    name: str
    """Its address, by which verl's load balancer knows it."""
    server: Any
    """Handle of the server that owns the engine."""
    servers: Sequence[Any]
    """Handles of its servers on all nodes."""
    ranks: Sequence[int] = ()
    """Its ranks of the actor's worker group; empty for a replica on devices of its own, which has no spot worker. The
    first one's device is the spot worker's."""
    worker: Any = None
    """Handle of the spot worker, once started."""
    restarts: int = field(default=0)


class Fleet:
    """Replicas, their spot workers, and calls to all of them at once.

    Args:
        llm_server_manager: verl's, of the replicas that share devices with the actor.
        worker_count: ranks of the actor.
        standalone: verl's manager of replicas on devices of their own, whose balancer then serves everybody.
    """

    def __init__(self, llm_server_manager: Any, worker_count: int, standalone: Any = None) -> None:
        replicas = llm_server_manager.get_replicas()
        width = max(1, worker_count // max(1, len(replicas)))
        self.balancer = (standalone or llm_server_manager).global_load_balancer
        self.replicas = {
            r._server_address: Replica(
                r._server_address, r._server_handle, list(r.servers), range(i * width, (i + 1) * width)
            )
            for i, r in enumerate(replicas)
        }
        for r in standalone.get_replicas() if standalone else ():
            self.replicas[r._server_address] = Replica(r._server_address, r._server_handle, list(r.servers))
        self._new_worker: Callable[..., Any] | None = None
        self._published: Any = None  # ObjectRef of the latest published drafter; the driver owns the copy

    def start_workers(self, pool: Any, **arguments: Any) -> None:
        """Create a spot worker per replica on the actor's devices: in the bundles of `pool`, verl's RayResourcePool."""
        bundles = [(group, i) for group in pool.get_placement_groups() for i in range(group.bundle_count)]
        share = get_platform().ray_resource_options(1.0 / pool.max_colocate_count)

        def create(replica: Replica, agreed: Any = None, published: Any = None) -> Any:
            group, index = bundles[replica.ranks[0]]
            placed = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            options = {"scheduling_strategy": placed, "num_cpus": 0, **share}
            return (
                ray.remote(SpotWorker)
                .options(**options)
                .remote(name=replica.name, agreed=agreed, published=published, **arguments)
            )

        self._new_worker = create
        for replica in self.replicas.values():
            if replica.ranks:
                replica.worker = create(replica)

    def restart(self, names: Collection[str]) -> None:
        """Kill these replicas' spot workers and start others in their places; nobody waits for them to be up.

        A new worker's buffer is empty until the next step, but it starts from what the others agree on, or else its
        changes would be measured from another version than theirs. Without others it starts from what was published
        last, which is what the engines serve.
        """
        if not names:
            return
        assert self._new_worker is not None
        for name in names:
            ray.kill(self.replicas[name].worker)
        others = [worker for name, worker in self.workers().items() if name not in names]
        for name in names:
            replica = self.replicas[name]
            agreed = others[0].agreed.remote() if others else None
            replica.worker = self._new_worker(replica, agreed, None if others else self._published)
            replica.restarts += 1
            logger.warning("spot worker of %s was killed and restarted (%d times so far)", name, replica.restarts)

    def workers(self) -> dict[str, Any]:
        """Spot workers by replica."""
        return {name: r.worker for name, r in self.replicas.items() if r.worker is not None}

    def on_workers(self, method: str, *args: Any) -> dict[str, Any]:
        """Call every spot worker and wait; the result by replica. One that has died is restarted and left out."""
        calls = {name: getattr(worker, method).remote(*args) for name, worker in self.workers().items()}
        done, dead = {}, []
        for name, reference in calls.items():
            try:
                done[name] = ray.get(reference, timeout=CALL_TIMEOUT_S)
            except ray.exceptions.RayActorError as error:
                logger.warning("spot worker of %s died: %s", name, error)
                dead.append(name)
        self.restart(dead)
        return done

    def on_servers(self, method: str, *args: Any, timeout: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Call the engine-owning server of every replica and wait; the result by replica."""
        calls = {name: getattr(r.server, method).remote(*args) for name, r in self.replicas.items()}
        return dict(zip(calls, ray.get(list(calls.values()), timeout=timeout), strict=True))

    def disable_drafting(self, names: Collection[str]) -> None:
        """These replicas, and no others, decode without a drafter from the next weight sync on."""
        calls = [r.server.tlt_disable_drafting.remote(name in names) for name, r in self.replicas.items()]
        ray.get(calls, timeout=CALL_TIMEOUT_S)

    def stage(self, drafter: DrafterFile) -> None:
        """Hand a published drafter to every server actor of every replica, on every node."""
        self._published = reference = ray.put(drafter)
        calls = [s.tlt_stage.remote(reference) for r in self.replicas.values() for s in r.servers]
        ray.get(calls, timeout=CALL_TIMEOUT_S)

    def inflight(self) -> dict[str, int]:
        """Requests in flight by replica, of those that are in the load balancer."""
        return ray.get(self.balancer.get_status.remote(), timeout=CALL_TIMEOUT_S)["servers"]

    def leave(self, name: str) -> None:
        """Take a replica out of the load balancer."""
        ray.get(self.balancer.remove_servers.remote([name]), timeout=CALL_TIMEOUT_S)

    def join(self, names: Sequence[str]) -> None:
        """Put replicas into the load balancer; those that are in it already stay as they are."""
        present = self.inflight()
        missing = {n: self.replicas[n].server for n in names if n not in present}
        if missing:
            ray.get(self.balancer.add_servers.remote(missing), timeout=CALL_TIMEOUT_S)
