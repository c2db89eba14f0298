"""Rollout servers and their load balancer, as the trainer calls them: an answer in time, or `CallFailed`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_tlt.messages.rollout import DrafterStatus, EngineStats
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.trainer.waits import CALL_S, CallFailed, Deadline, answer, ask

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplica

logger = logging.getLogger(__name__)

SLEEP_S = 30.0
"""Bound in seconds of calls that take a few seconds at most, such as falling asleep, while the RL trainer waits."""
STAGE_S = 600.0
"""Bound in seconds of handing a published drafter out, gigabytes to all nodes at once, while the RL trainer waits. It
guards against a server that does not answer, and a network or disk that stands still."""
CALIBRATION_S = 1200.0
"""Bound in seconds of a calibration: the engine may warm up and capture graphs meanwhile."""


class DrafterStore:
    """Where rollout servers find the run's first drafter; a Ray actor under the job's `messages.rollout.store_name`.

    They are handed later versions directly (`Servers.stage`).
    """

    def __init__(self, drafter: list[ObjectRef]) -> None:
        self._drafter = drafter

    def first(self) -> list[ObjectRef]:
        """The reference to it, a `DrafterFile`; in a list, or Ray would send the drafter itself."""
        return self._drafter


@dataclass(frozen=True)
class Replica:
    name: str  # its address, by which verl's load balancer knows it
    ranks: Sequence[int]  # the actor's ranks on its devices; empty: it is standalone, on devices of its own
    server: ActorHandle  # the server that owns the engine
    servers: Sequence[ActorHandle]  # the servers on all nodes

    @property
    def colocated(self) -> bool:
        """Whether the replica shares its devices with the actor."""
        return bool(self.ranks)


def measuring(replicas: Mapping[str, Replica]) -> Replica:
    """The replica that measures step times; in `separate_async` one of those that decode the rollouts."""
    return min(replicas.values(), key=lambda replica: replica.colocated)


class Servers:
    """Rollout replicas by name, and the calls to their servers.

    They start with `drafter`, a `DrafterFile`; the actor has `world_size` ranks. With `standalone`, its balancer serves
    all.
    """

    def __init__(
        self, manager: LLMServerManager, standalone: LLMServerManager | None, world_size: int, drafter: ObjectRef
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        colocated = manager.get_replicas()
        width = max(1, world_size // max(1, len(colocated)))  # ranks of a replica
        for i, replica in enumerate(colocated):
            self._add(replica, range(i * width, (i + 1) * width))
        if standalone is not None:
            for replica in standalone.get_replicas():
                self._add(replica, range(0))
        self.balancer = (standalone or manager).global_load_balancer
        self._published = drafter

    def _add(self, replica: RolloutReplica, ranks: Sequence[int]) -> None:
        name = replica._server_address
        self.replicas[name] = Replica(name, ranks, replica._server_handle, list(replica.servers))

    def inflight(self) -> dict[str, int]:
        """Requests in flight by replica, of those that are in the load balancer."""
        # Asked many times a second, so Ray is to keep no record of it (4 KB a call).
        status = self.balancer.get_status.options(enable_task_events=False).remote()
        requests: dict[str, int] = ask(status, CALL_S)["servers"]
        return requests

    def leave(self, name: str) -> None:
        ask(self.balancer.remove_servers.remote([name]), CALL_S)

    def rejoin(self, names: Collection[str]) -> None:
        """Put replicas back into the load balancer; those that are in it already stay as they are."""
        present = self.inflight()
        missing = {name: self.replicas[name].server for name in names if name not in present}
        if missing:
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
        calls = [r.server.tlt_disable_drafting.remote(r.name in names, at_once) for r in self.replicas.values()]
        ask(calls, CALL_S)

    def stage(self, drafter: ObjectRef) -> int:
        """Hand a published drafter, a `DrafterFile`, to every server on every node; how many replicas did not take it.

        Those replicas are handed the drafter before it again; a node that cannot write that either keeps its own. A
        `CallFailed` where none took it: it is not published then.
        """
        calls = {name: [server.tlt_stage.remote(drafter) for server in r.servers] for name, r in self.replicas.items()}
        deadline = Deadline(STAGE_S)
        failed: list[str] = []
        first_error: CallFailed | None = None
        for name, of_replica in calls.items():
            try:
                ask(of_replica, deadline.left())
            except CallFailed as error:
                logger.warning(
                    "replica %s does not take the drafter, and goes on with the one before it: %s", name, error
                )
                failed.append(name)
                first_error = first_error or error
        back = [server.tlt_stage.remote(self._published) for name in failed for server in self.replicas[name].servers]
        with suppress(CallFailed):
            ask(back, deadline.left() + SLEEP_S)
        if first_error is not None and len(failed) == len(self.replicas):
            raise first_error
        self._published = drafter
        return len(failed)

    def drafter_statuses(self) -> dict[str, DrafterStatus]:
        return self._of_each("tlt_status")

    def engine_stats(self) -> dict[str, EngineStats]:
        """What each engine did since it was last asked."""
        return self._of_each("tlt_stats")

    def calibrate(self) -> LatencyTable:
        """Measure on one replica what engine steps cost: replicas that decode rollouts are alike."""
        costs: LatencyTable = ask(measuring(self.replicas).server.tlt_calibrate.remote(), CALIBRATION_S)
        logger.info("engine step costs: %s", costs)
        return costs

    def tell_costs(self, costs: LatencyTable) -> None:
        """Tell the other replicas what one has measured; their first drafts may compile kernels, as that one's did."""
        if not costs.points:
            return
        measured = measuring(self.replicas)
        others = [r for r in self.replicas.values() if r is not measured]
        ask([r.server.tlt_calibrate.remote(costs) for r in others], CALIBRATION_S)

    def close(self) -> None:
        """The run is over: every server, on every node, ends its engine and clears away what it put there."""
        answer([server.tlt_close.remote() for server in self._everywhere()], SLEEP_S)

    def _everywhere(self) -> list[ActorHandle]:
        return [server for r in self.replicas.values() for server in r.servers]

    def _of_each(self, method: str) -> dict:
        """What each replica's server answers to a call without arguments, by replica."""
        calls = {name: getattr(r.server, method).remote() for name, r in self.replicas.items()}
        answers = ask(list(calls.values()), CALL_S)
        return dict(zip(calls, answers, strict=True))
