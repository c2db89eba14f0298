"""One sampling phase, watched from a thread: look at the fleet, ask the planner, carry out its commands.

All decisions are the planner's (`idle.planner`). An error in here ends spot training for the phase and nothing else;
a replica that left comes back with the weight sync.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl_tlt.idle.planner import Command, IdlePlanner, IdleTime, Look
from verl_tlt.messages.training import SessionResult
from verl_tlt.trace.events import Session, TraceWriter
from verl_tlt.trainer.pending_work import AskPending
from verl_tlt.trainer.waits import SYSTEM, CallFailed, Clock

if TYPE_CHECKING:
    from verl_tlt.trainer.servers import Servers
    from verl_tlt.trainer.spot import SpotTrainerHandle

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two looks at the load: each is a call to the load balancer, which also serves the agent loops."""
SETTLE_S = 0.1
"""Seconds for which a replica must have been empty, or the trainer have waited for samples, before it trains."""
LOAD_S = 1.0
"""Seconds between two loads in the trace, unless a replica becomes idle or busy."""
LOAD_REPLICAS = 16
"""A load in the trace names every replica. With more replicas than this, `LOAD_S` grows in proportion, and no load is
added when a replica becomes idle or busy."""
LOOK_S = 60.0
"""Bound in seconds of a look at the fleet, which takes milliseconds; the end of sampling may wait for it."""


@dataclass
class PhaseReport:
    """What happened in a sampling phase; times in unix seconds."""

    idle: IdleTime
    end: float = 0.0  # when the last request had finished
    first_dispatch: float | None = None
    sessions: list[Session] = field(default_factory=list)
    error: str | None = None


class SamplingWatch:
    """Carries out a planner's commands from `on_sample_begin` to `on_sample_end`.

    With `recall` the replica that leaves keeps its weights, so that it can be called back.
    """

    def __init__(
        self,
        servers: Servers,
        spot: SpotTrainerHandle,
        planner: IdlePlanner,
        pending_work: AskPending,
        trace: TraceWriter,
        step: int,
        recall: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self._servers = servers
        self._spot = spot
        self._planner = planner
        self._pending_work = pending_work
        self._trace = trace
        self._step = step
        self._recall = recall
        self._clock = clock
        self._unix = clock.time() - clock.monotonic()  # decisions take the monotonic clock, the trace unix seconds
        self._report = PhaseReport(planner.idle_time(clock.monotonic()))
        self._session: tuple[str, float] | None = None  # replica on which a session runs, and its begin
        self._traced_load: dict[str, int] = {}  # the last one in the trace
        self._load_traced_at = 0.0
        self._lost: set[str] = set()  # replicas that were put back, of which the log knows
        self._over = clock.event()
        self._turn = clock.lock()  # a recall comes from the trainer's thread, while this one looks
        self._thread = clock.start(self._watch, "tlt-sampling-watch")

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        try:
            while not self._over.wait(POLL_S):
                with self._turn:
                    self._look()
        except Exception as error:  # sampling goes on without spot training
            self._report.error = f"{type(error).__name__}: {error}"
            logger.exception("spot training stops for this sampling phase")

    def _look(self) -> None:
        load = self._servers.inflight()
        if self._over.is_set():  # the answer took so long that the trainer's thread may have gone on
            return
        now = self._clock.monotonic()
        self._trace_load(load, now)
        if self._report.first_dispatch is None and any(load.values()):
            self._report.first_dispatch = now + self._unix
        if self._session is not None and (result := self._spot.ended()) is not None:
            self._session_ended(result)
        ready = self._session is None and self._spot.ready()
        commands = self._planner.observe(Look(now, load, self._pending_work(), ready))
        for lost in {command.replica for command in commands if command.do == "rejoin"} - self._lost:
            logger.warning("the load balancer had lost replica %s; it is put back", lost)
            self._lost.add(lost)
        self._carry_out(commands)

    def _trace_load(self, load: dict[str, int], now: float) -> None:
        """Write the load into the trace if it changed: every `LOAD_S`, and when a replica becomes idle or busy.

        In a fleet of more than `LOAD_REPLICAS` it is written less often.
        """
        busy = {name: count > 0 for name, count in load.items()}
        was_busy = {name: count > 0 for name, count in self._traced_load.items()}
        turned = busy != was_busy
        every_s = LOAD_S * max(1.0, len(load) / LOAD_REPLICAS)
        due = load != self._traced_load and now - self._load_traced_at >= every_s
        if due or (turned and len(load) <= LOAD_REPLICAS):
            self._trace.emit("load", step=self._step, inflight=load)
            self._traced_load = load
            self._load_traced_at = now

    def _carry_out(self, commands: list[Command]) -> None:
        """Carry out commands and what they lead to, until sampling ends: the trainer waits for the one under way."""
        queue = list(commands)
        while queue and not self._over.is_set():
            following = self._do(queue.pop(0))
            queue = following + queue

    def _do(self, command: Command) -> list[Command]:
        """Carry out one command; returns what the planner asks for next."""
        name = command.replica
        match command.do:
            case "rejoin":
                self._servers.rejoin([name])
                return []
            case "leave":
                return self._leave(name)
            case "train":
                self._spot.train(name)
                now = self._clock.monotonic()
                self._session = (name, now)
                self._planner.training(name, now)
                return []

    def _leave(self, name: str) -> list[Command]:
        self._servers.leave(name)
        if self._over.is_set():  # nobody waits for this look any more: the replica is back after the weight sync
            return []
        try:
            slept = self._servers.try_sleep(name, keep_weights=self._recall)
        except CallFailed as error:
            logger.warning("replica %s did not say whether it sleeps, and stays out of this rollout: %s", name, error)
            self._planner.failed(name)
            return []
        return self._planner.slept(name) if slept else self._planner.refused(name, self._clock.monotonic())

    def _session_ended(self, result: SessionResult) -> None:
        assert self._session is not None
        replica, begun = self._session
        self._session = None
        now = self._clock.monotonic()
        self._planner.ended(now, over=result.outcome != "stopped")
        session = Session(
            **vars(result), t=now + self._unix, step=self._step, replica=replica, start=begun + self._unix,
            end=now + self._unix,
        )  # fmt: skip
        self._report.sessions.append(session)

    # ------------------------------------------------------------------ the trainer's thread

    def recall(self, stop_timeout_s: float) -> None:
        """More requests are about to be sent: the replica that has left is called back and serves again."""
        if not self._turn.acquire(timeout=LOOK_S):
            raise CallFailed(f"a look at the fleet took longer than {LOOK_S:.0f} s")
        try:
            self._stop(stop_timeout_s)
            if (name := self._planner.recall()) is None:
                return
            try:
                self._servers.wake_up(name)
            except CallFailed as error:
                logger.error("replica %s could not be called back before the weight sync: %s", name, error)
                self._planner.failed(name)
            else:
                self._carry_out(self._planner.awake(name, self._clock.monotonic()))
        finally:
            self._turn.release()

    def finish(self, stop_timeout_s: float) -> PhaseReport:
        """End of sampling: stop the session, and wait for that at most `stop_timeout_s`."""
        self._over.set()
        self._thread.join(LOOK_S)
        if self._thread.is_alive():  # a call that does not come back, and whose answer matters no more
            self._report.error = f"a look at the fleet took longer than {LOOK_S:.0f} s"
            logger.error("the end of sampling goes on without its watch: %s", self._report.error)
        now = self._clock.monotonic()
        self._planner.end(now)
        self._stop(stop_timeout_s)
        self._report.idle = self._planner.idle_time(self._clock.monotonic())
        self._report.end = self._report.idle.end + self._unix
        return self._report

    def _stop(self, stop_timeout_s: float) -> None:
        """Stop the session, if one runs."""
        if self._session is not None:
            self._session_ended(self._spot.stop(stop_timeout_s))
