"""Speculation control of one engine: asks the policy for K, sums what came of it, answers the rollout server.

vLLM's scheduler (`engine_core/scheduler.py`) calls everything here on one thread.
"""

import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any

from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.limits import Limits
from verl_tlt.speculation.step_statistics import StepSums
from verl_tlt.speculation.types import OFF, Policy, Step

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
"""Seconds of engine steps between two writes of the trace."""
UNWRITTEN = 120
"""Most writes that wait for a slow disk; what comes then is left out."""
MOST_BYTES = 64 << 20
"""Size of a trace at which a new file begins: some hours of engine steps. Of the older files one stays."""
OLDER = ".old"
"""What is added to the name of the older file."""
FLUSHED_S = 2.0
"""Most seconds that the end of an engine waits for the disk."""


class StepTrace:
    """Appends one JSON line per engine step to a file, a buffer at a time and in a thread of its own.

    A disk that fails or is slow costs only the trace: no engine step waits for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: str | None = None
        self._full = False
        self._unwritten: queue.Queue[list[str]] = queue.Queue(UNWRITTEN)
        threading.Thread(target=self._write, name="tlt-trace", daemon=True).start()
        self._lines: list[str] = []
        self._flushed_at = 0.0

    def add(self, step: Step) -> None:
        """Queue one line; written out after `FLUSH_S` seconds of steps, or by `flush`."""
        self._lines.append(
            f'{{"t":{step.unix_s:.4f},"batch":{step.batch},"k":{step.drafted},"latency_s":{step.latency_s:.6f}}}\n'
        )
        if abs(step.unix_s - self._flushed_at) > FLUSH_S:  # also where the clock was set back
            self._flushed_at = step.unix_s
            self.flush()

    def flush(self, wait_s: float = 0.0) -> None:
        """Have the thread write what is queued, and wait up to `wait_s` until it has."""
        lines = self._lines
        self._lines = []
        try:
            if lines:
                self._unwritten.put_nowait(lines)
        except queue.Full:
            if not self._full:
                logger.warning("The disk is too slow: some engine steps are missing in the trace %s.", self.path)
            self._full = True
        with self._unwritten.all_tasks_done:
            self._unwritten.all_tasks_done.wait_for(lambda: not self._unwritten.unfinished_tasks, wait_s)

    def _write(self) -> None:
        while True:
            lines = self._unwritten.get()
            try:
                if not self.failed:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with self.path.open("a") as file:
                        file.writelines(lines)
                        full = file.tell() > MOST_BYTES
                    if full:
                        os.replace(self.path, f"{self.path}{OLDER}")
            except OSError as error:
                self.failed = str(error)
                logger.warning("The engine trace %s stops here: %s", self.path, error)
            finally:
                self._unwritten.task_done()


class StepControl:
    """Has the policy choose K within the engine's limits, and sums what came of it."""

    def __init__(self, policy: Policy, limits: Limits, trace: StepTrace | None = None) -> None:
        self.policy = policy
        self.limits = limits
        self.trace = trace
        self.drafting = True
        self.force_k: int | None = None
        self.failure: str | None = None
        """The exception that ended speculation in this engine: its caller draws no more drafts."""
        self._sums = StepSums()

    def choose(self, batch: int) -> int:
        """K of the coming step of so many requests, or OFF; an engine step waits for this."""
        if not self.drafting:
            return OFF
        wanted = self.policy.choose(batch) if self.force_k is None else self.force_k
        return self.limits.fitting(wanted, batch)

    def record(self, step: Step) -> None:
        self._sums.add(step)
        if self.trace is not None:
            self.trace.add(step)
        if self.force_k is None:  # as in a calibration: random prompts show no acceptance
            self.policy.observe(step)

    def fail(self, error: Exception) -> None:
        """Note the exception after which this engine drafts nothing any more."""
        self.failure = f"{type(error).__name__}: {error}"
        logger.error(
            "verl-tlt failed in this engine. It decodes without drafts for the rest of the run.", exc_info=error
        )

    def flush(self, wait_s: float = 0.0) -> None:
        if self.trace is not None:
            self.trace.flush(wait_s)

    def stats(self, reset: bool = False) -> EngineStats:
        if self.failure is not None:
            return EngineStats(failure=self.failure)
        self.flush()
        return self._sums.stats(reset)

    def control(self, **settings: Any) -> dict[str, Any]:
        """Overrule or inform the policy; ValueError for an unknown setting or a value that cannot be.

        `force_k`: this K in every step, until None. `drafting`: False while the worker's drafter is off. `acceptance`:
        conditional, per draft position, expected of the drafter that is served now; empty: nothing is known of it;
        None: it is as before. `points`: the calibration, rows of `LatencyTable.to_list`.
        """
        unknown = set(settings) - {"force_k", "drafting", "acceptance", "points"}
        if unknown:
            raise ValueError(f"control does not know {', '.join(sorted(unknown))}.")
        if "force_k" in settings:
            k = settings["force_k"]
            if k is not None and k not in self.limits.lengths:
                raise ValueError(f"force_k must be null or one of {list(self.limits.lengths)}, not {k!r}.")
            self.force_k = k
        if "drafting" in settings:
            self.drafting = bool(settings["drafting"])
        if settings.get("points"):
            costs = LatencyTable.from_list(settings["points"])
            self._sums.calibrated(costs)
            self.policy.set_costs(costs)
        if settings.get("acceptance") is not None:
            self.policy.set_acceptance([float(a) for a in settings["acceptance"]])
        return {"drafting": self.drafting, "force_k": self.force_k}
