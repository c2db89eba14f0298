"""Speculation control of one engine: asks the policy for K, sums what came of it, answers the rollout server.

vLLM's scheduler (`engine_core/scheduler.py`) calls everything here on one thread. An engine step waits for `choose`,
which has little left to do: `record`, called while the model runs the following step, learns from the last one and lets
the policy prepare its next choice.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.decision import Limits, draft_length
from verl_tlt.speculation.step_statistics import Aggregates, DraftsByLength, StepTotals
from verl_tlt.speculation.types import Load, Policy, StepRecord

logger = logging.getLogger(__name__)


class StepSink(Protocol):
    """Where finished engine steps are written down (`engine_core.steps.StepTrace`)."""

    def add(self, step: StepRecord, unix_s: float) -> None: ...
    def flush(self) -> None: ...


class StepControl:
    """Has the draft length of each step decided (`draft_length`) and remembers what came of it, in `trace` if given."""

    def __init__(self, policy: Policy, limits: Limits, trace: StepSink | None = None) -> None:
        self.policy = policy
        self.limits = limits
        self.trace = trace
        self.drafting = True
        self.force_k: int | None = None
        self.policy_error: str | None = None
        self.costs: LatencyModel | None = getattr(policy, "latency", None)
        """What steps cost here, OFF included, where the policy learns it."""
        self._calibration = LatencyTable()
        self._sums = Aggregates()
        self._responses = DraftsByLength()

    def choose(self, load: Load, longest: int = 0, room: int = sys.maxsize) -> int:
        """K of the coming step, or OFF; `longest` and `room` as `draft_length` has them."""
        forced = 0 if self.force_k is None and self.policy_error is not None else self.force_k
        try:
            limits = {"longest": longest, "room": room}
            return draft_length(self.policy, load, self.limits, drafting=self.drafting, forced=forced, **limits)
        except Exception as error:
            self._give_up(error)
            return 0

    def record(self, step: StepRecord, totals: StepTotals) -> None:
        """Sum one finished step, write it down, and let the policy learn from it."""
        self._sums.add(step, totals)
        if self.trace is not None:
            self.trace.add(step, totals.unix_s)
        if self.policy_error is not None:
            return
        try:
            self.policy.observe(step)
            if self.drafting and self.force_k is None:
                self._tell_policy("prepare", Load(step.batch, step.kv_tokens))
        except Exception as error:
            self._give_up(error)

    def responses(self, accepted: Iterable[tuple[str, int]], ended: Iterable[tuple[str, int]]) -> None:
        """Sum a step by response: (request, draft tokens accepted) by draft, (request, tokens) of those that ended."""
        self._responses.verified(accepted)
        for request, tokens in ended:
            self._responses.ended(request, tokens)

    def drafter_broke(self, dropped: int) -> None:
        """The worker dropped this many draft tokens that had no probability: OFF until the drafter is switched on."""
        if self.drafting:
            logger.error(
                "The drafter's probabilities are not finite: %d draft tokens were dropped, and it is off.", dropped
            )
        self.drafting = False
        self._sums.drafts_broke(dropped)

    def flush(self) -> None:
        """Write out the trace; called whenever the engine runs out of work."""
        if self.trace is not None:
            self.trace.flush()

    def _give_up(self, error: Exception) -> None:
        """A policy that raises costs speculation, never the rollout: K=0 from here on, said in every `stats`."""
        self.policy_error = f"{type(error).__name__}: {error}"
        logger.error("The speculation policy failed; this engine decodes with K=0 from here on.", exc_info=error)

    def stats(self, reset: bool = False) -> EngineStats:
        """Sums since the last reset."""
        sums = self._sums
        if reset:
            self._sums = Aggregates()
        if self.trace is not None:
            self.trace.flush()
        return replace(sums.stats(self.policy_error), responses=self._responses.rows(reset))

    def control(self, **settings: Any) -> dict[str, Any]:
        """Overrule or inform the policy; ValueError for an unknown setting or a value that cannot be.

        Args:
            **settings: any of `force_k` (this K in every step, until set to None), `drafting` (False while the worker's
                drafter is switched off, `TLTWorkerExtension.tlt_set_drafting`), `acceptance` (conditional, per draft
                position, expected of a drafter just published; empty: nothing known), `points` (step costs that were
                measured, or learned by an earlier run: rows of `LatencyTable.to_list`).
        """
        unknown = set(settings) - {"force_k", "drafting", "acceptance", "points"}
        if unknown:
            raise ValueError(f"control does not know {', '.join(sorted(unknown))}.")
        if "force_k" in settings:
            k, longest = settings["force_k"], self.limits.arms[-1]
            if k is not None and (not isinstance(k, int) or not 0 <= k <= longest):
                raise ValueError(f"force_k must be 0..{longest} or null, not {k!r}.")
            self.force_k = k
        if "drafting" in settings:
            self.drafting = bool(settings["drafting"])
        if settings.get("points"):
            table = LatencyTable.from_list(settings["points"])
            self._calibration = table.calibration()
            self._tell_policy("set_latency", table)
        if settings.get("acceptance"):
            self._tell_policy("set_acceptance", [float(a) for a in settings["acceptance"]])
        return {"drafting": self.drafting, "force_k": self.force_k}

    def learned(self) -> dict[str, Any]:
        """What engine steps were found to cost, for the next run: `points` as `control` takes them."""
        table = self._calibration if self.costs is None else self.costs.to_table(self._calibration)
        return {"points": table.to_list()}

    def _tell_policy(self, method: str, value: Any) -> None:
        """Call an optional method of the policy; a fixed policy has no use for estimates."""
        hear = getattr(self.policy, method, None)
        if hear is not None:
            hear(value)
