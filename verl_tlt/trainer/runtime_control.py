"""Who decodes the coming rollout without a drafter, and what TLT saved in the last one.

All do while speculation is switched off or stopped (`trainer.payoff`), but for a probe; else whoever is audited.
Each engine besides decides by what it saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from verl_tlt.messages.rollout import Calibration, EngineStats
from verl_tlt.speculation.baseline import Baseline, Savings, Times
from verl_tlt.speculation.costs.latency_table import stock_share
from verl_tlt.speculation.costs.tables import StockPoint, stock_points
from verl_tlt.trainer.audit import Audit, audit_of, audit_saving
from verl_tlt.trainer.payoff import Payoff
from verl_tlt.trainer.runtime_switch import RuntimeSwitch, SwitchError, read_switch

logger = logging.getLogger(__name__)


class RuntimeControl:
    """The trainer's side: reads the switch between rollouts and says which replicas draft nothing.

    Args:
        directory: of the switch (`tlt.trace.dir`).
        replicas: all replicas, in a fixed order.
        control_every: `tlt.speculation.control_every`.
        shared: the replicas share a machine (`Baseline`).
        payoff: stops what does not pay; None: one with the usual settings.
    """

    def __init__(
        self,
        directory: str,
        replicas: Sequence[str],
        control_every: int,
        shared: bool = False,
        payoff: Payoff | None = None,
    ) -> None:
        self.payoff = payoff or Payoff(replicas)
        self.directory, self.replicas, self.control_every = directory, list(replicas), control_every
        self.baseline = Baseline(shared)
        self.savings = Savings()
        """Of the last rollout."""
        self._stock: Sequence[StockPoint] = ()
        self.switch = RuntimeSwitch()
        self.audit = Audit()
        """Of the coming rollout."""
        self._shared = shared
        self._complaint = ""

    def drafting_disabled(self, step: int) -> list[str]:
        """Replicas that decode the rollout of `step` without a drafter. An unreadable file changes nothing."""
        try:
            switch = read_switch(self.directory)
            self._complaint = ""
        except SwitchError as error:
            if str(error) != self._complaint:
                logger.warning("%s TLT goes on as before.", error)
            self._complaint, switch = str(error), self.switch
        if switch != self.switch:
            said = ", ".join(f"{key} {'on' if value else 'off'}" for key, value in asdict(switch).items())
            logger.warning("TLT was switched from outside; from step %d on: %s", step, said)
        self.switch = switch
        on = switch.speculation and not self.payoff.cause
        self.audit = audit_of(step, self.replicas, self.control_every, self._shared) if on else Audit()
        if on:
            return list(self.audit.replicas)
        probe = self.payoff.choose_probe() if switch.speculation else None
        return [name for name in self.replicas if name != probe]

    def calibrated(self, found: Calibration) -> None:
        """Take note of what engine steps were measured to cost.

        Stock vLLM schedules beside the model where a core is free for that, as it is for an engine that is measured
        alone. On a shared machine the other replicas need that core, and a step in OFF takes what stock's does.
        """
        self._stock = () if self._shared else stock_points(found.stock)
        self.baseline.calibrated(dict(found.latency), self._stock)

    def account(self, stats: Mapping[str, EngineStats], training: Times = ()) -> Savings:
        """What TLT saved in this rollout, whose steps without a drafter are learned from first.

        Args:
            stats: the schedulers' sums by replica.
            training: when a replica trained.
        """
        rollout = {name: s.load_intervals for name, s in stats.items() if s.load_intervals}
        self.baseline.learn(rollout, training)
        self.savings = self.baseline.savings(rollout, training)
        if self.switch.speculation and stats:
            work = [row for s in stats.values() for row in s.work]
            batch = sum(w.batch * w.seconds for w in work) / max(sum(w.seconds for w in work), 1e-9)
            share = stock_share(self._stock, max(batch, 1.0))
            if said := self.payoff.observe(stats, self.savings, share, bool(self.audit.replicas)):
                logger.warning("%s", said)
        return self.savings

    def report(self, stats: Mapping[str, EngineStats]) -> float | None:
        """The saving that this rollout's audit showed (`tlt/audit_saved_frac`).

        None: there was no audit, nobody drafted beside it, or there is too little to compare.

        Args:
            stats: the schedulers' sums by replica.
        """
        audit, self.audit = self.audit, Audit()
        if len(audit.replicas) != 1:
            return None
        (name,) = audit.replicas
        if name not in stats or not stats[name].work:
            return None
        found = audit_saving(stats[name].work, [s.work for n, s in stats.items() if n != name], self._stock)
        if found is None:
            logger.info("audit: %s decoded without a drafter, at loads too unlike the others' to compare", name)
            return None
        logger.info(
            "audit: drafting saved %.1f %% of decoding time (%.0f %% of it compared)", *(100 * x for x in found)
        )
        return found[0]
