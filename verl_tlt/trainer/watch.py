"""One sampling phase, watched from a thread: looks at the fleet, asks the planner, carries out its commands.

All decisions are the planner's (`idle.replica_idle`, `idle.trainer_idle`). This file only turns its commands into Ray
calls and their results back into reports, and keeps what happened for metrics and trace. An error in here ends spot
training for the phase and nothing else; whoever left the balancer comes back with the weight sync.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from verl_tlt.idle.planner import (
    Command,
    LeaveBalancer,
    PhaseAccount,
    Planner,
    Rejoin,
    StartTraining,
    StopTraining,
    TrySleep,
    WakeUp,
    next_pause,
)
from verl_tlt.messages.training import SessionResult
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.fleet import Call, CallFailed, Fleet
from verl_tlt.trainer.pending_work import PendingWork

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
"""A session that has ended has its result in the object store; this is for bringing it here."""
LOAD_LINE_S = 0.5e-3
"""Seconds between two lines of load for each replica in them: 50 KB of trace a second, however many there are."""
LOOK_S = 60.0
"""A look takes milliseconds; when sampling ends, the trainer waits at most this for one that hangs."""


@dataclass
class Ended:
    """A session that is over, on the trainer's clock (unix seconds)."""

    replica: str
    start: float
    end: float
    result: SessionResult | None
    error: str | None = None
    stop_latency_s: float | None = None


@dataclass
class PhaseReport:
    """What one sampling phase brought."""

    account: PhaseAccount
    sessions: list[Ended] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    stop_s: float = 0.0
    """Seconds the trainer waited for workers to stop."""
    first_dispatch: float | None = None
    error: str | None = None


class SamplingWatch:
    """Runs from `on_sample_begin` to `on_sample_end`.

    Args:
        fleet: replicas and spot workers.
        planner: this phase's decisions.
        pending_work: what may still arrive; called at every look.
        poll_s: seconds between two looks while the load changes (`next_pause`).
        trace: where load and idle events go.
        step: the RL step, for the trace.
        recall: whether a replica that leaves keeps its weights, so that it can be called back.
    """

    def __init__(
        self,
        fleet: Fleet,
        planner: Planner,
        pending_work: Callable[[], PendingWork],
        poll_s: float,
        trace: TraceWriter,
        step: int,
        recall: bool = False,
    ) -> None:
        self.fleet, self.planner, self.pending_work = fleet, planner, pending_work
        self.poll_s, self.trace, self.step, self._recall = poll_s, trace, step, recall
        self._running: dict[str, tuple[Call[SessionResult], float]] = {}  # by replica: (call, start)
        self._report = PhaseReport(planner.account(time.time()))
        self._end = threading.Event()
        self._turn = threading.Lock()  # a recall comes from the trainer's thread, while this one looks
        self._load: dict[str, int] = {}
        self._written: dict[str, int] = {}  # of the load, to the trace
        self._write_at = 0.0
        self._thread = threading.Thread(target=self._watch, name="tlt-sampling-watch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        pause = self.poll_s
        try:
            while not self._end.wait(pause):
                with self._turn:
                    pause = next_pause(pause, self.poll_s, self._look())
        except Exception as error:  # sampling goes on without spot training
            self._report.error = f"{type(error).__name__}: {error}"
            logger.exception("spot training stops for this sampling phase")

    def _look(self) -> bool:
        """Returns whether anything has changed since the last look."""
        load, now, work = self.fleet.inflight(), time.time(), self.pending_work()
        changed = load != self._load
        if changed:
            self._load = load
            if self._report.first_dispatch is None and any(load.values()):
                self._report.first_dispatch = now
        if load != self._written and now >= self._write_at:
            self._write_load(now)
        commands = self.planner.observe(now, load, work.pending, work.open_loops, work.refill_possible)
        for lost in [command.replica for command in commands if isinstance(command, Rejoin)]:
            logger.warning("the load balancer had lost replica %s; it is put back", lost)
        self._do(commands)
        calls = {name: call for name, (call, _) in self._running.items()}
        over = self.fleet.first_done(calls, 0.0) if calls else []
        for name in over:
            if self._collect(name).error is None:
                self._do(self.planner.done(name, time.time()))
            else:
                self._do(self.planner.failed(name, time.time()))
        return changed or bool(commands) or bool(over)

    def _write_load(self, now: float) -> None:
        """A line of the trace names every replica: a large fleet's are written less often."""
        self._written, self._write_at = self._load, now + LOAD_LINE_S * len(self._load)
        self.trace.emit("load", step=self.step, inflight=self._load)

    def _do(self, commands: list[Command]) -> None:
        queue = list(commands)
        while queue:
            queue += self._carry_out(queue.pop(0))

    def _carry_out(self, command: Command) -> list[Command]:
        name = command.replica
        match command:
            case LeaveBalancer():
                self.fleet.leave(name)
                return self.planner.left(name)
            case Rejoin():
                self.fleet.join([name])
                return []
            case TrySleep():
                try:
                    slept = self.fleet.try_sleep(name, keep_weights=self._recall)
                except CallFailed as error:
                    logger.warning("replica %s did not answer whether it may sleep: %s", name, error)
                    return self.planner.failed(name, time.time())
                return self.planner.slept(name) if slept else self.planner.refused(name, time.time())
            case StartTraining():
                self._running[name] = (self.fleet.train(name), time.time())
                return self.planner.training(name, time.time())
            case StopTraining():
                return []  # `_stop` stops them together
            case WakeUp():
                try:
                    self.fleet.wake_up(name)
                except CallFailed as error:
                    logger.error("replica %s could not be called back before the weight sync: %s", name, error)
                    return self.planner.failed(name, time.time())
                return self.planner.awake(name, time.time())
        raise AssertionError(command)

    def _collect(self, name: str, stop_latency_s: float | None = None) -> Ended:
        """The result of a session that has ended, however it ended."""
        call, start = self._running.pop(name)
        ended = Ended(name, start, time.time(), None, stop_latency_s=stop_latency_s)
        try:
            ended.result = call.result(ANSWER_S)
        except CallFailed as error:
            ended.error = str(error)
            logger.warning("spot training on %s failed: %s", name, error)
            if error.died:
                self.fleet.restart([name])
        self._report.sessions.append(ended)
        return ended

    # ------------------------------------------------------------------ the trainer's thread

    def recall(self, stop_timeout_s: float) -> None:
        """More requests are about to be sent: whoever has left is called back first, and then serves again."""
        start = time.time()
        if not self._turn.acquire(timeout=LOOK_S):
            raise CallFailed(f"a look at the fleet took longer than {LOOK_S:.0f} s")
        try:
            commands = self.planner.recall()
            self._stop([c.replica for c in commands if isinstance(c, StopTraining)], stop_timeout_s)
            self._do([c for c in commands if not isinstance(c, StopTraining)])
        finally:
            self._turn.release()
        self._report.stop_s += time.time() - start

    def finish(self, stop_timeout_s: float) -> PhaseReport:
        """End of sampling: stop what trains, wait at most `stop_timeout_s`, kill what does not answer."""
        start = time.time()
        self._end.set()
        self._thread.join(LOOK_S)
        if self._load != self._written:
            self._write_load(start)
        if self._thread.is_alive():  # a call that does not come back; what it will say is nobody's business any more
            self._report.error = f"a look at the fleet took longer than {LOOK_S:.0f} s"
            logger.error("the end of sampling goes on without its watch: %s", self._report.error)
        self._stop([c.replica for c in self.planner.end(time.time())], stop_timeout_s)
        self._kill(list(self._running), stop_timeout_s)
        self._report.stop_s += time.time() - start
        self._report.account = self.planner.account(time.time())
        return self._report

    def _stop(self, names: list[str], stop_timeout_s: float) -> None:
        """Stop these sessions together; those that have not answered in time are killed."""
        start = time.time()
        stopping = [name for name in names if name in self._running]
        for name in stopping:
            self.fleet.stop(name)
        deadline = start + stop_timeout_s
        while waiting := [n for n in stopping if n in self._running]:
            left = deadline - time.time()
            if left <= 0:
                break
            for name in self.fleet.first_done({n: self._running[n][0] for n in waiting}, left):
                now = time.time()
                if self._collect(name, stop_latency_s=now - start).error is None:
                    self.planner.stopped(name, now)
                else:
                    self.planner.failed(name, now)
        self._kill([name for name in stopping if name in self._running], stop_timeout_s)

    def _kill(self, names: list[str], stop_timeout_s: float) -> None:
        self.fleet.restart(names)
        error = f"did not stop within {stop_timeout_s} s and was killed"
        for name in names:
            logger.warning("spot training on %s failed: it %s", name, error)
            _, begin = self._running.pop(name)
            self.planner.failed(name, time.time())
            self._report.killed.append(name)
            self._report.sessions.append(Ended(name, begin, time.time(), None, error=error))
