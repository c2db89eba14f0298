"""One sampling phase, watched from a thread: looks at the fleet, asks the planner, carries out its commands.

All decisions are the planner's (`idle.replica_idle`). An error in here ends spot training for the
phase and nothing else; replicas that left come back with the weight sync.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl_tlt.idle import replica_idle as idle
from verl_tlt.messages.training import SessionResult
from verl_tlt.trace.events import Session, TraceWriter
from verl_tlt.trainer.waits import SYSTEM, Call, CallFailed, Clock, Deadline

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_tlt.trainer.spot_workers import Fleet

logger = logging.getLogger(__name__)

FAILED = SessionResult("failed")
ANSWER_S = 1.0
"""Bound in seconds of fetching the result of a session that has ended."""
LOAD_LINE_S = 0.5e-3
"""Seconds between two lines of load in the trace, per replica: 50 KB a second, however many replicas there are."""
LOOK_S = 60.0
"""Bound in seconds of a look at the fleet, which takes milliseconds; the end of sampling may wait for it."""


@dataclass(frozen=True)
class PendingWork:
    """What the trainer knows about work still to come in a sampling phase."""

    pending: int = 0  # groups that no agent loop has taken up yet
    more: bool = False
    """An agent loop may send another turn, or sampling may still ask for more groups (DAPO filtering, failed ones)."""


AskPending = Callable[[], PendingWork]


def takes_turns(config: DictConfig, dataset: Sequence[Mapping[str, object]]) -> bool:
    """Whether an agent loop may send another turn, as all may that are not verl's single-turn loop, or are unknown.

    verl runs for each row of `dataset` the loop that its `agent_name` names, or else the default one.
    """
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.experimental.agent_loop.utils import resolve_config_path
    from verl.utils.import_utils import load_class_from_fqn

    rollout = config.actor_rollout_ref.rollout
    path = rollout.agent.agent_loop_config_path
    names = [rollout.agent.default_agent_loop]
    try:
        if "agent_name" in dataset[0]:
            names = dataset.dataframe.unique("agent_name")  # type: ignore[attr-defined]  # verl's RLHFDataset
        own = {loop.name: loop for loop in OmegaConf.load(resolve_config_path(path))} if path else {}
        loops = [load_class_from_fqn((_agent_loop_registry | own)[name]["_target_"]) for name in names]
        other = rollout.multi_turn.enable or rollout.agent.get("agent_loop_manager_class")
        if not other and all(issubclass(loop, SingleTurnAgentLoop) for loop in loops):
            return False
        logger.info("no replica leaves while agent loops run: they may send more turns")
    except Exception as error:
        logger.warning("no replica leaves while agent loops run: %s may send more turns: %r", names, error)
    return True


class BufferWatch:
    """The pending work, counted from verl's replay buffer (`verl/trainer/ppo/v1/replay_buffer.py`).

    verl's buffer empties its sets, asks TransferQueue and fills them again, while the watch reads them from another
    thread. So the counts are taken right after each of the buffer's looks, and replaced at once. Of a sampler that is
    not derived from verl's nothing is known, so no replica may leave. One sampling takes `wanted` groups.
    """

    # Changes verl: patches/README.md#tlt-knows-of-samples-that-verl-may-still-ask-for
    def __init__(self, buffer: ReplayBuffer, *, multi_turn: bool, wanted: int) -> None:
        self._buffer, self._multi_turn, self._wanted = buffer, multi_turn, wanted
        try:
            look, self._counted = buffer._sync_metadata_from_transfer_queue, self._count()
        except AttributeError:
            logger.warning("%s does not say what may still arrive, so no replica leaves early.", type(buffer).__name__)
            self._counted = PendingWork(more=True)
            return

        def look_and_count() -> None:
            look()
            self._counted = self._count()

        buffer._sync_metadata_from_transfer_queue = look_and_count

    def __call__(self) -> PendingWork:
        return self._counted

    def _count(self) -> PendingWork:
        buffer = self._buffer
        filters, done = buffer.filter_groups_metric is not None, buffer.finished_keys["train"]
        if filters:  # DAPO: only after its look the buffer finds out which to replace, and which have a signal (None)
            done = {uid for uid, shared in buffer._dapo_classification_cache["train"].items() if shared is None} & done
        more = (filters or buffer.sync_refill_failed_groups) and len(done) < self._wanted
        more = more or (self._multi_turn and bool(buffer.running_keys["train"]))
        return PendingWork(len(buffer.pending_keys["train"]), more)


@dataclass
class PhaseReport:
    account: idle.PhaseAccount
    sessions: list[Session] = field(default_factory=list)
    first_dispatch: float | None = None
    error: str | None = None


class SamplingWatch:
    """Carries out a planner's commands from `on_sample_begin` to `on_sample_end`.

    It looks every `poll_s` seconds while the load changes (`next_pause`). With `recall` a replica that leaves keeps its
    weights, so that it can be called back.
    """

    def __init__(
        self,
        fleet: Fleet,
        planner: idle.ReplicaIdlePlanner,
        pending_work: AskPending,
        poll_s: float,
        trace: TraceWriter,
        step: int,
        recall: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self.fleet, self.planner, self.pending_work, self._clock = fleet, planner, pending_work, clock
        self.poll_s, self.trace, self.step, self._recall = poll_s, trace, step, recall
        self.running: dict[str, tuple[Call[SessionResult], float]] = {}
        """Sessions by replica: (call, start)."""
        self.report = PhaseReport(planner.account(clock.time()))
        """The phase so far; `finish` returns it."""
        self._end = clock.event()
        self._turn = clock.lock()  # a recall comes from the trainer's thread, while this one looks
        self._load: dict[str, int] = {}
        self._written: dict[str, int] = {}  # of the load, to the trace
        self._write_at = 0.0
        self._thread = clock.start(self._watch, "tlt-sampling-watch")

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        pause = self.poll_s
        try:
            while not self._end.wait(pause):
                with self._turn:
                    pause = idle.next_pause(pause, self.poll_s, self._look())
        except Exception as error:  # sampling goes on without spot training
            self.report.error = f"{type(error).__name__}: {error}"
            logger.exception("spot training stops for this sampling phase")

    def _look(self) -> bool:
        """Returns whether anything has changed since the last look."""
        load, now, work = self.fleet.inflight(), self._clock.time(), self.pending_work()
        changed, self._load = load != self._load, load
        if self.report.first_dispatch is None and any(load.values()):
            self.report.first_dispatch = now
        if load != self._written and now >= self._write_at:
            self._write_load(now)
        commands = self.planner.observe(now, load, work.pending, work.more)
        for lost in [command.replica for command in commands if command.do == "rejoin"]:
            logger.warning("the load balancer had lost replica %s; it is put back", lost)
        self._do(commands)
        calls = {name: call for name, (call, _) in self.running.items()}
        done = self.fleet.first_done(calls, 0.0) if calls else []
        for name in done:
            self._collect(name)
        return changed or bool(commands) or bool(done)

    def _write_load(self, now: float) -> None:
        """Write the load to the trace. A line names every replica: a large fleet's are written less often."""
        self._written, self._write_at = self._load, now + LOAD_LINE_S * len(self._load)
        self.trace.emit("load", step=self.step, inflight=self._load)

    def _do(self, commands: list[idle.Command]) -> None:
        """Carry out commands one by one, until sampling ends: the trainer waits for the one under way then."""
        queue = list(commands)
        while queue and not self._end.is_set():
            queue[:0] = self._carry_out(queue.pop(0))

    def _carry_out(self, command: idle.Command) -> list[idle.Command]:
        """Returns what the planner asks for next."""
        name = command.replica
        match command.do:
            case "train":
                self.running[name] = (self.fleet.train(name), self._clock.time())
                self.planner.training(name, self._clock.time())
            case "rejoin":
                self.fleet.rejoin([name])
            case "leave":
                self.fleet.leave(name)
                return self.planner.left(name)
            case "try_sleep":
                try:
                    slept = self.fleet.try_sleep(name, keep_weights=self._recall)
                except CallFailed as error:
                    logger.warning(
                        "replica %s did not answer whether it may sleep, and stays out of this rollout: %s", name, error
                    )
                    self.planner.failed(name, self._clock.time())
                else:
                    return self.planner.slept(name) if slept else self.planner.refused(name, self._clock.time())
            case "wake_up":
                try:
                    self.fleet.wake_up(name)
                except CallFailed as error:
                    logger.error("replica %s could not be called back before the weight sync: %s", name, error)
                    self.planner.failed(name, self._clock.time())
                else:
                    return self.planner.awake(name, self._clock.time())
        return []

    def _collect(self, name: str, stop_latency_s: float | None = None) -> None:
        call, start = self.running.pop(name)
        times: dict[str, Any] = {"start": start, "end": self._clock.time(), "stop_latency_s": stop_latency_s}
        try:
            result = call.result(ANSWER_S)
        except CallFailed as error:
            self._over(name, error=str(error), **times)
            logger.warning("spot training on %s failed: %s", name, error)
            if error.died:
                self.fleet.restart([name])
            self.planner.failed(name, self._clock.time())
        else:
            self._over(name, result, **times)
            self.planner.stopped(name, self._clock.time())

    def _over(self, name: str, result: SessionResult = FAILED, **facts: Any) -> None:
        session = Session(**vars(result), **facts, t=self._clock.time(), step=self.step, replica=name)
        self.report.sessions.append(session)

    # ------------------------------------------------------------------ the trainer's thread

    def recall(self, stop_timeout_s: float) -> None:
        """More requests are about to be sent: replicas that have left are called back and serve again."""
        if not self._turn.acquire(timeout=LOOK_S):
            raise CallFailed(f"a look at the fleet took longer than {LOOK_S:.0f} s")
        try:
            commands = self.planner.recall()
            self._stop([c.replica for c in commands if c.do == "stop"], stop_timeout_s)
            self._do([c for c in commands if c.do != "stop"])
        finally:
            self._turn.release()

    def wait(self, seconds: float) -> None:
        """Wait until all sessions that were started are over, or the watch has failed; `seconds` at most."""
        deadline = Deadline(seconds, self._clock)
        while (left := deadline.left()) > 0.0 and (self.running or not self.report.sessions) and not self.report.error:
            self._clock.event().wait(min(self.poll_s, left))

    def finish(self, stop_timeout_s: float) -> PhaseReport:
        """End of sampling: stop what trains, wait at most `stop_timeout_s`, kill what does not answer."""
        start = self._clock.time()
        self._end.set()
        self._thread.join(LOOK_S)
        if self._load != self._written:
            self._write_load(start)
        if self._thread.is_alive():  # a call that does not come back, and whose answer matters no more
            self.report.error = f"a look at the fleet took longer than {LOOK_S:.0f} s"
            logger.error("the end of sampling goes on without its watch: %s", self.report.error)
        self._stop([c.replica for c in self.planner.end(self._clock.time())], stop_timeout_s)
        self._kill(list(self.running), stop_timeout_s)
        self.report.account = self.planner.account(self._clock.time())
        return self.report

    def _stop(self, names: list[str], stop_timeout_s: float) -> None:
        """Stop these sessions together; those that have not answered in time are killed."""
        start, deadline = self._clock.time(), Deadline(stop_timeout_s, self._clock)
        stopping = [name for name in names if name in self.running]
        for name in stopping:
            self.fleet.stop(name)
        while (waiting := [n for n in stopping if n in self.running]) and (left := deadline.left()) > 0.0:
            for name in self.fleet.first_done({n: self.running[n][0] for n in waiting}, left):
                self._collect(name, stop_latency_s=self._clock.time() - start)
        self._kill([name for name in stopping if name in self.running], stop_timeout_s)

    def _kill(self, names: list[str], stop_timeout_s: float) -> None:
        self.fleet.restart(names)
        error = f"did not stop within {stop_timeout_s} s and was killed"
        for name in names:
            logger.warning("spot training on %s failed: it %s", name, error)
            _, begin = self.running.pop(name)
            self.planner.failed(name, self._clock.time())
            self._over(name, start=begin, end=self._clock.time(), error=error)
