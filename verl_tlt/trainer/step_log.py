"""What happens in one RL step, as trace events and metrics; and TLT's own failures, after which the run goes on."""

import dataclasses
import importlib.metadata
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import DrafterStatus, EngineStats
from verl_tlt.messages.training import CapturedStates, Verdict
from verl_tlt.trace.events import Publish, Reload, Session, TraceWriter
from verl_tlt.trace.metrics import StepObservations, step_line, step_metrics
from verl_tlt.trainer.run_setup import RunFacts
from verl_tlt.trainer.servers import Replica
from verl_tlt.trainer.waits import SYSTEM, Clock
from verl_tlt.trainer.watch import PhaseReport

logger = logging.getLogger(__name__)

E = TypeVar("E", Session, Publish, Reload)

DISTRIBUTIONS = ("verl-tlt", "verl", "vllm", "torch", "ray", "transformers", "speculators")


class Guard:
    """Contains TLT's own failures, and counts them by what failed (`tlt/errors`).

    Each kind is logged in full the first time, and in one line after that.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """A failure inside is logged, counted under `what`, and goes no further."""
        try:
            yield
        except Exception as error:
            self.counts[what] += 1
            if self.counts[what] == 1:
                logger.exception("TLT: %s failed; the run goes on without it", what)
            else:
                logger.error("TLT: %s failed again (%d times): %s", what, self.counts[what], error)

    def warn(self, what: str, sentence: str | None) -> None:
        """Count something that is not as it should be, if there is a sentence about it; log the first one."""
        if sentence:
            self.counts[what] += 1
            if self.counts[what] == 1:
                logger.warning("%s Later rollouts are only counted (tlt/errors_%s).", sentence, what)

    def count(self, what: str, failures: int) -> None:
        """Add failures that were logged where they happened."""
        if failures:
            self.counts[what] += failures


class StepLog:
    """Recorder of one step; `finish` empties it for the next."""

    def __init__(self, trace: TraceWriter, clock: Clock = SYSTEM) -> None:
        self.trace = trace
        self.clock = clock
        self.guard = Guard()
        self._disabled = ""
        self._begin()

    def _begin(self) -> None:
        self.observed = StepObservations(errors=self.guard.counts)
        self._off = ""
        self.reloads: dict[str, Reload] = {}  # by replica

    def _charge(self, part: str, seconds: float) -> None:
        _add(self.observed.overhead, {part: seconds})

    def _event(self, kind: type[E], step: int, record: object, **further: Any) -> E:
        """Write an event: its fields are those of `record` that it has, too, and `further` ones."""
        names = {field.name for field in dataclasses.fields(kind)}
        fields = {name: value for name, value in vars(record).items() if name in names}
        fields |= further
        fields |= {"step": step, "t": self.clock.time()}
        event = kind(**fields)
        self.trace.add(event)
        return event

    def run_started(self, step0: int, config: TLTConfig, replicas: Mapping[str, Replica], facts: RunFacts) -> None:
        """Write the trace's first event; `step0` is the first RL step, which is not charged with the start."""
        self.observed.overhead.clear()
        standalone = [name for name, info in replicas.items() if not info.colocated]
        versions = dict.fromkeys(DISTRIBUTIONS, "not installed")
        for name in DISTRIBUTIONS:
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        self.trace.emit(
            "run", step0=step0, replicas=list(replicas), standalone=standalone, gpus=facts.gpus,
            config=config.to_dict(), versions=versions, policy=facts.provenance.policy, name=facts.name,
            hardware=facts.hardware,
        )  # fmt: skip

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        start = self.clock.time()
        try:
            yield
        finally:
            self.trace.emit("phase", step=step, name=name, start=start, end=self.clock.time())

    @contextmanager
    def overhead(self, name: str) -> Iterator[None]:
        """Charge TLT's own time on the critical path."""
        start = self.clock.monotonic()
        try:
            yield
        finally:
            self._charge(name, self.clock.monotonic() - start)

    @contextmanager
    def charged(self, what: str, part: str | None = None) -> Iterator[None]:
        """Contain failures of TLT's own work on the critical path, and charge its time to `part`, or else to `what`."""
        with self.guard(what), self.overhead(part or what):
            yield

    def sampled(self, step: int, report: PhaseReport) -> None:
        """A sampling phase is over; an asynchronous step may have several."""
        idle = report.idle
        observed = self.observed
        _add(observed.idle_s, idle.idle_s)
        observed.trained_s = (observed.trained_s or 0.0) + idle.trained_s
        start = report.first_dispatch or report.end
        self.trace.emit("phase", step=step, name="rollout", start=start, end=report.end)
        self.trained(step, report.sessions)

    def trained(self, step: int, sessions: Sequence[Session]) -> None:
        """Training sessions are over, in idle time or in a cold start."""
        self.observed.spot_failures = self.observed.spot_failures or 0
        self.observed.sessions += sessions
        for session in sessions:
            self._event(Session, step, session, verdict=None)

    def spot_trainer_failed(self) -> None:
        self.observed.spot_failures = (self.observed.spot_failures or 0) + 1

    def engine_stats(self, stats: dict[str, EngineStats]) -> int:
        """Keep the engines' sums of this rollout, by replica; returns how many engines have none."""
        self.observed.replicas = {name: s for name, s in stats.items() if s.failure is None}
        return len(stats) - len(self.observed.replicas)

    def speculated(self, step: int, saved_s: float | None, disabled: str, off: str = "") -> None:
        """Note what speculation did in this rollout.

        `saved_s`: estimated seconds that it saved. `disabled`: why it is disabled after this rollout; empty: it is not.
        `off`: why no replica drafted in this rollout; empty: one did.
        """
        self._off = off
        self.observed.saved_s = saved_s
        self.observed.speculation_disabled = bool(disabled)
        if disabled != self._disabled:
            self.trace.emit("stopped", step=step, cause=disabled)
        self._disabled = disabled

    def captured(self, captured: Sequence[CapturedStates]) -> None:
        """Charge what capturing hidden states added to the log-prob forward and to the last weight sync."""
        self._charge("capture", max((c.seconds for c in captured), default=0.0))
        self._charge("sync", max((c.sync_seconds for c in captured), default=0.0))

    def judged(self, step: int, verdict: Verdict, version: int) -> None:
        """A verdict on the candidate is in; engines serve `version` from now on."""
        self.observed.publish = self._event(Publish, step, verdict, version=version)
        lengths = ", ".join(f"{which} {tau:.2f}" for which, tau in verdict.tau.items()) or "unknown"
        logger.info("drafter %s (%s); held-out accept length: %s", verdict.decision, verdict.reason, lengths)

    def reloaded(self, step: int, statuses: dict[str, DrafterStatus], wanted: int) -> None:
        """Note which drafter each engine has loaded; `wanted` is the version that all of them should serve."""
        for name, status in statuses.items():
            ok = status.ok and status.version == wanted
            known = self.reloads.get(name)
            if known is None or (known.ok, known.version) != (ok, status.version):
                self.reloads[name] = self._event(Reload, step, status, replica=name, ok=ok)
        self.observed.reloads = list(self.reloads.values())
        self.observed.served_version = min((s.version for s in statuses.values()), default=None)
        self.observed.overhead["reload"] = max((r.seconds for r in self.observed.reloads), default=0.0)

    def finish(self, step: int, metrics: dict[str, Any]) -> dict[str, float]:
        """The step's `tlt/*` metrics, given verl's; ends the step in trace and log."""
        self.guard.count("trace", self.trace.failures - self.guard.counts["trace"])
        tlt = step_metrics(self.observed)
        numbers = {key: value for key, value in {**metrics, **tlt}.items() if _is_number(value)}
        self.trace.emit("step", step=step, metrics=numbers, off=self._off)
        self._begin()
        with self.guard("step line"):  # a disk that is full
            print(step_line(numbers, step), flush=True)
        return tlt


def _is_number(value: object) -> bool:
    """Whether a metric is a number: Python's, or a scalar of numpy or torch."""
    return isinstance(value, int | float) or hasattr(value, "item")


def _add(sums: dict[str, float], terms: Mapping[str, float]) -> None:
    for name, seconds in terms.items():
        sums[name] = sums.get(name, 0.0) + seconds
