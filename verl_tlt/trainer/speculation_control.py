"""Who decodes the coming rollout without drafts, and what TLT saved in the last one: decisions with their inputs."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from verl_tlt.config import SpeculationConfig
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.decision import RunDecision
from verl_tlt.speculation.savings import ControlRollouts, SavingsAccount, Times
from verl_tlt.speculation.types import OFF
from verl_tlt.trainer.runtime_switch import SWITCH_FILE, RuntimeSwitch, SwitchError, read_switch

logger = logging.getLogger(__name__)


class SpeculationControl:
    """Decides before every rollout who drafts, and learns from every rollout.

    `directory` is the switch's (`tlt.trace.dir`), `replicas` are in a fixed order; `shared`: on one machine.
    `active_share` is the policy's (`drafter.policy.active_share`).
    """

    def __init__(
        self, directory: str, replicas: list[str], config: SpeculationConfig, shared: bool, active_share: float
    ) -> None:
        self.directory, self.replicas = directory, replicas
        self.decision = RunDecision(self.replicas, config.policy, config.source, active_share, config.arms)
        self.saving = self.decision.rollout.saving
        self.account = SavingsAccount(shared, active_share)
        self._controls = ControlRollouts(self.replicas, config.control_every, shared)
        self.switch = RuntimeSwitch()
        self.control: Sequence[str] = ()
        """Replicas whose coming rollout is a control rollout."""
        self._undrafted: Sequence[str] = ()
        self.off = ""
        """Why no replica drafts in the coming rollout; empty: one does."""
        self._shared = shared
        self._never = "the settings turn speculation off" if not config.enable or config.policy == "off" else ""
        self._complaint = ""

    @property
    def disabled(self) -> str:
        """Why speculation is disabled, for the run or from outside; empty: it is not."""
        return self.decision.cause if self.switch.speculation else f"it is switched off in {SWITCH_FILE}"

    @property
    def undrafted_since(self) -> str:
        """Why nothing is drafted, by the settings or since it did not pay; empty: drafting is allowed."""
        return self._never or self.decision.rollout.never or self.decision.cause

    @property
    def may_train(self) -> bool:
        """Whether drafters may be trained during the coming rollout: not on processors that a control rollout needs."""
        return self.switch.spot and not (self._shared and self.control)

    def calibrated(self, table: LatencyTable) -> None:
        self.decision.rollout.calibrated(table)
        if not self._never and (why := self.decision.rollout.never):
            logger.warning("Nothing is drafted in this run: %s.", why)
        self.account.calibrated(table.by_batch(OFF))

    def undrafted(self, step: int, acceptance: Sequence[float]) -> list[str]:
        """Replicas that decode the rollout of `step` without drafts.

        `acceptance` is the served drafter's conditional acceptance by draft position, empty where it is unknown.
        """
        self._read_switch(step)
        drafting = self.decision.drafting(acceptance) if self.switch.speculation else []
        self.off = "" if drafting else self.disabled or self.decision.rollout.against
        wanted = len(drafting) == len(self.replicas) and not self.disabled  # else the others are the measure
        self.control = self._controls.chosen(step) if wanted else ()
        self._undrafted = [name for name in self.replicas if name not in drafting or name in self.control]
        return list(self._undrafted)

    def _read_switch(self, step: int) -> None:
        try:
            switch, complaint = read_switch(self.directory), ""
        except SwitchError as error:
            switch, complaint = self.switch, str(error)
        if complaint and complaint != self._complaint:
            logger.warning("%s TLT goes on as before.", complaint)
        if switch != self.switch:
            changes = ", ".join(f"{key} {'on' if value else 'off'}" for key, value in asdict(switch).items())
            logger.warning("TLT was switched from outside; from step %d on: %s", step, changes)
        self.switch, self._complaint = switch, complaint

    def rollout_ended(self, stats: Mapping[str, EngineStats], training: Times = ()) -> float | None:
        """Seconds that TLT saved in a rollout during which replicas trained at some `Times`; None: unknown."""
        savings = self.account.rollout(stats, training)
        self._controls.ended(self._undrafted, bool(training), savings != (None, None))
        if self.switch.speculation and (notice := self.decision.learn(stats, savings.gain)):
            logger.warning("%s", notice)
        return savings.saved_s
