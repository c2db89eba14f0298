"""The spot trainer as the RL trainer sees it: where it runs, its five verbs, and what happens when it fails.

TLT trains the drafter in idle time. The *spot trainer* (the paper's name) is one process per run, on the node of the
actor's first rank. It sees all of that node's GPUs and reserves none of them.

Every call has a bound. A spot trainer that raises, dies or is late is killed, and another one takes its place: it goes
on from the drafter that was published last. One that finds too little memory for a session stays, and is asked again.
After `STRIKES` other failures in a row nothing is trained in this run any more; the last one is still there to write
the drafter into checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform.platform_manager import get_platform
from verl.utils.device import get_torch_device

from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import (
    BufferStats,
    CapturedStates,
    CaptureReady,
    DrafterProvenance,
    SessionResult,
    SpotPlan,
)
from verl_tlt.spot_trainer.worker import SpotTrainerWorker
from verl_tlt.trainer.waits import CALL_S, SYSTEM, CallFailed, Clock, Deadline, answer, arrived, is_gone

if TYPE_CHECKING:
    from verl.single_controller.base import WorkerGroup

logger = logging.getLogger(__name__)

STRIKES = 3
"""Failures in a row, without a session that ended well in between, after which nothing is trained any more."""
START_S = 300.0
"""Bound in seconds of a start: it imports libraries and loads the drafter. Only checkpoints wait for it."""
SAVE_S = 600.0
"""Bound in seconds of writing a drafter: gigabytes, perhaps over a network, perhaps beside many other jobs."""
MEMORY_S = 10.0
"""Bound in seconds of the wait for the memory of a process that was killed: the next phase needs its GPU. As long may
Ray take to start the process that looks."""


@dataclass(frozen=True)
class Place:
    """Where the spot trainer runs."""

    node: str  # Ray's id
    devices: tuple[str, ...]  # Ray's ids of the accelerators that it sees
    replicas: Mapping[str, int]  # by colocated replica of this node: the number of its first device among `devices`

    @classmethod
    def beside(cls, ranks: Sequence[CaptureReady], replicas: Mapping[str, Sequence[int]]) -> Place:
        """The node of the actor's first rank. `replicas` has the ranks on each colocated replica's devices."""
        node = ranks[0].node
        devices = tuple(dict.fromkeys(rank.device for rank in ranks if rank.node == node))
        here = {}
        for name, own in replicas.items():
            if local := [rank for rank in own if ranks[rank].node == node]:
                here[name] = devices.index(ranks[local[0]].device)
        return cls(node, devices, here)


class HiddenStates:
    """The actor's ranks, which capture hidden states in the old-log-prob forward."""

    def __init__(self, actor: WorkerGroup) -> None:
        self._actor = actor

    def set_up(self, config: TLTConfig, aux_layers: Sequence[int], counts_tokens: bool) -> list[CaptureReady]:
        """Have every rank capture from now on; `counts_tokens`: and count the first rollout's tokens."""
        ready: list[CaptureReady] = answer(self._actor.tlt_setup(config, list(aux_layers), counts_tokens), CALL_S)
        return ready

    def take(self, counts: bool) -> list[CapturedStates]:
        """What each rank captured in the last forward; its arrays stay in the object stores.

        `counts`: with the counts of tokens that `set_up` asked for.
        """
        taken: list[CapturedStates] = answer(self._actor.tlt_take(counts), CALL_S)
        return taken

    def release(self) -> None:
        """Have every rank return GPU memory that nothing uses."""
        answer(self._actor.tlt_release(), CALL_S)

    def stop(self) -> None:
        """Have no rank capture any more."""
        answer(self._actor.tlt_stop(), CALL_S)


class SpotTrainerHandle:
    """The run's spot trainer. Used by one thread at a time."""

    def __init__(self, plan: SpotPlan, clock: Clock = SYSTEM) -> None:
        self.plan = plan
        self.off = "spot training has not started"
        """Why nothing is trained; empty: the drafter is trained."""
        self.failures: list[str] = []
        """What failed since the RL trainer last counted, in words."""
        self.last_failure = ""
        self.stats: BufferStats | None = None
        """What the buffer held when the last step's hidden states had arrived; None: nothing yet."""
        self.left_out = 0
        """Sequences that lacked a rank's part, since the RL trainer last counted."""
        self.published: ObjectRef | None = None
        """The drafter that was exported last; None: none in this run."""
        self._clock = clock
        self._running = False
        self._failures_in_a_row = 0
        self._no_room_logged = False
        self._draft_ids: ObjectRef | None = None
        self._verifier_weights: ObjectRef | None = None  # that the spot trainer has not got yet
        self._groups: list[list[int]] = []
        self._pid: int | None = None
        self._add: ObjectRef | None = None
        self._sessions = 0
        self._session: ObjectRef | None = None
        self._export: tuple[ObjectRef, ObjectRef] | None = None  # facts and drafter

    # ------------------------------------------------------------------ start

    def start(self, ranks: Sequence[CaptureReady], replicas: Mapping[str, Sequence[int]]) -> None:
        """Start the spot trainer; does not wait for it.

        `ranks` are the actor's, in order; `replicas` has the ranks on each colocated replica's devices.
        """
        self.place = Place.beside(ranks, replicas)
        groups: dict[int, list[int]] = {}
        for rank, ready in enumerate(ranks):
            groups.setdefault(ready.group, []).append(rank)
        self._groups = list(groups.values())
        self.off = ""
        self._running = True
        self._begin()
        logger.info(
            "the spot trainer starts on node %s, and may train on the devices of %d replicas; its buffer holds %.1f GB",
            self.place.node, len(self.place.replicas), self.plan.buffer_bytes / 1e9,
        )  # fmt: skip

    def _begin(self) -> None:
        """Start a process, which replaces an earlier one; does not wait for it."""
        platform = get_platform()
        environment: dict[str, str] = {}
        device_module: Callable[[], Any] | None = None
        if self.plan.device == "cpu":
            device_module = get_torch_device
        else:
            environment[platform.visible_devices_envvar()] = ",".join(self.place.devices)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.place.node, soft=False),
            # As verl starts its rollout servers: Ray leaves the choice of devices to the process.
            "runtime_env": {"env_vars": dict.fromkeys(platform.ray_noset_envvars(), "1")},
        }
        self._actor: ActorHandle = (
            ray.remote(SpotTrainerWorker)
            .options(**options)
            .remote(self.plan, environment, self.published, self._draft_ids, device_module)
        )
        self._up: ObjectRef = self._actor.pid.remote()
        self._start_by = Deadline(START_S, self._clock)
        self._pid = self._add = self._session = self._export = None
        self.stats = None

    def rehearse(self, within_s: float) -> None:
        """Load and tune the kernels of a session, before the run's first step; they would delay a stop."""
        if self.plan.device == "cpu":
            return
        self.wait_until_started()
        if self.started():
            self._answer("start", self._actor.rehearse.remote(), within_s)

    @property
    def running(self) -> bool:
        """Whether there is a spot trainer, which can write the drafter even if nothing is trained any more."""
        return self._running

    @property
    def replicas(self) -> Mapping[str, int]:
        """Colocated replicas on whose devices it may train, with the number of each one's first device."""
        return self.place.replicas if self._running else {}

    def wait_until_started(self) -> None:
        """Wait for the first start; a failure is found by `started`."""
        if self._running:
            arrived(self._up, START_S)

    def started(self) -> bool:
        """Whether the spot trainer is up; one that does not start in time is replaced."""
        if self._pid is None:
            if arrived(self._up):
                self._pid = self._answer("start", self._up, CALL_S)
            elif self._start_by.left() <= 0:
                self.failed("start", f"it did not start within {START_S:.0f} s")
        return self._pid is not None

    # ------------------------------------------------------------------ hidden states

    def choose_tokens(self, draft_ids: np.ndarray) -> None:
        """From the next `add` on the drafter drafts these tokens, int64 [DV]; so does one that is started later."""
        self._draft_ids = ray.put(draft_ids)

    def add(self, step: int, captured: Sequence[CapturedStates]) -> None:
        """Send what the actor's ranks captured; does not wait for the copies."""
        if self.off:
            return
        # They come once after a weight sync, so they wait here for a spot trainer that cannot take them yet.
        self._verifier_weights = next(
            (c.verifier_weights for c in captured if c.verifier_weights is not None), self._verifier_weights
        )
        self._collect_add()
        if self._add is not None:
            logger.info("the spot trainer still takes the last step's hidden states, and does not get this step's")
            return
        if not self.started():
            logger.info("the spot trainer is still starting, and gets the next step's hidden states")
            return
        groups = [[captured[rank].shards for rank in group] for group in self._groups]
        self._add = self._actor.add.remote(step, groups, self._verifier_weights, self._draft_ids)
        self._verifier_weights = None
        self._add_by = Deadline(CALL_S, self._clock)

    def ready(self) -> bool:
        """Whether a session could begin now: the last hidden states have arrived, and there are enough of them."""
        if self.off or not self.started():
            return False
        self._collect_add()
        if self._add is not None or self._session is not None:
            return False
        return self.stats is not None and self.stats.train_tokens >= self.plan.min_tokens

    def _collect_add(self, wait: bool = False) -> None:
        """Read the answer to the last `add`, if it has arrived; with `wait`, wait for it until its deadline.

        A spot trainer that has not answered by the deadline has failed.
        """
        if self._add is None:
            return
        timeout_s = self._add_by.left() if wait else 0.0
        if arrived(self._add, timeout_s):
            call = self._add
            self._add = None
            self.stats = self._answer("hidden states", call, CALL_S)
            if self.stats is not None:
                self.left_out += self.stats.incomplete
        elif wait or self._add_by.left() <= 0:
            self.failed("hidden states", f"no answer within {CALL_S:.0f} s")

    # ------------------------------------------------------------------ sessions

    def train(self, replica: str) -> None:
        """Begin a session on the first device of a colocated replica, or on the first one of all."""
        self._sessions += 1
        self._session = self._actor.train.remote(self._sessions, self.place.replicas.get(replica, 0))

    def ended(self, timeout_s: float = 0.0) -> SessionResult | None:
        """The session's result if it ends within so many seconds; None: it runs on."""
        assert self._session is not None
        if not arrived(self._session, timeout_s):
            return None
        call = self._session
        self._session = None
        result: SessionResult | None = self._answer("session", call, CALL_S)
        if result is None:
            return SessionResult("failed", error=self.last_failure)
        self._failures_in_a_row = 0
        if result.outcome == "failed":  # too little memory, which the next session may find
            self.failures.append("session")
            if not self._no_room_logged:
                logger.warning("%s Later sessions are only counted (tlt/errors_session).", result.error)
            self._no_room_logged = True
        return result

    def stop(self, within_s: float) -> SessionResult:
        """End the session, within `within_s` seconds; a spot trainer that does not end it in time is replaced."""
        self._actor.stop.remote(self._sessions)
        result = self.ended(within_s)
        if result is None:
            self.failed("session", f"it did not stop within {within_s:g} s")
            return SessionResult("failed", error=self.last_failure)
        return result

    # ------------------------------------------------------------------ what leaves it

    def export(self) -> None:
        """Ask for the drafter that is to be published; does not wait."""
        self._export = tuple(self._actor.export.options(num_returns=2).remote())

    @property
    def exporting(self) -> bool:
        """Whether a drafter was asked for that is not there yet."""
        return self._export is not None

    def exported(self) -> DrafterFile | None:
        """The drafter that was asked for, without its weights; `published` then refers to the whole of it.

        None: it is late, or was given up.
        """
        if self._export is None or not arrived(self._export[0]):
            return None
        facts, drafter = self._export
        self._export = None
        exported: DrafterFile | None = self._answer("export", facts, CALL_S)
        if exported is not None:
            self.published = drafter
        return exported

    def save(
        self, directory: Path, provenance: DrafterProvenance, step: Path | None = None, rotates: bool = False
    ) -> None:
        """Write the served drafter and its training state; a `CallFailed` where it was not written.

        `step` and `rotates` are `check_room`'s. One that is just starting is waited for, and one that dies meanwhile is
        replaced and asked once more: the end of a run has time for this. One that hangs in an earlier call is found by
        that call's bound, which is shorter.
        """
        self._collect_add(wait=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        arguments = (str(directory.absolute()), provenance, step and str(step.absolute()), rotates)
        within_s = SAVE_S + (0.0 if self.started() else START_S)  # before the call: `started` may replace the actor
        try:
            answer(self._actor.save.remote(*arguments), within_s)
        except CallFailed as error:
            if not (error.died or error.late):
                raise
            self.failed("save", str(error))
            answer(self._actor.save.remote(*arguments), START_S + SAVE_S)
        if step is not None:
            self.plan = replace(self.plan, checkpoint=str(directory.absolute()))

    def on_its_node(self, function: Callable[..., Any], *arguments: object, within_s: float = CALL_S) -> Any:
        """Call a function in another process of the spot trainer's node, whose disk may be its own."""
        there = NodeAffinitySchedulingStrategy(self.place.node, soft=False)
        call = ray.remote(function).options(num_cpus=0, scheduling_strategy=there)
        return answer(call.remote(*arguments), within_s)

    def close(self) -> None:
        """The run is over."""
        if self._running:
            ray.kill(self._actor)

    # ------------------------------------------------------------------ failures

    def _answer(self, during: str, call: ObjectRef, within_s: float) -> Any:
        """The result of a call; None where it failed, and the spot trainer is replaced then."""
        try:
            return answer(call, within_s)
        except CallFailed as error:
            self.failed(during, str(error))
            return None

    def failed(self, during: str, error: str) -> None:
        """Put another spot trainer in the place of this one, which does not work; does not wait for the new one."""
        pid, actor = self._pid, self._actor
        ray.kill(actor)
        if pid is not None and self.plan.device != "cpu":
            self._await_memory(pid)
        self._count_failure(during, error)
        logger.warning("another spot trainer takes its place")
        self._begin()

    def _count_failure(self, during: str, error: str) -> None:
        """Count a failure; after `STRIKES` in a row nothing is trained any more."""
        self._failures_in_a_row += 1
        self.failures.append(during)
        self.last_failure = error
        logger.warning("the spot trainer failed (%s): %s", during, error)
        if self._failures_in_a_row >= STRIKES and not self.off:
            self.off = f"the spot trainer failed {STRIKES} times in a row, the last time in {during}: {error}"
            logger.error("the drafter is not trained in this run any more: %s", self.off)
            self._verifier_weights = None  # gigabytes in the object store

    def _await_memory(self, pid: int) -> None:
        """Wait until a process that was killed is gone, and with it its memory on the GPUs; bounded."""
        try:
            if not self.on_its_node(is_gone, pid, MEMORY_S, within_s=2 * MEMORY_S):
                logger.error("process %d of the spot trainer was killed %.0f s ago and still there", pid, MEMORY_S)
        except CallFailed as error:
            logger.error("nobody could say whether the spot trainer's process %d is gone: %s", pid, error)
