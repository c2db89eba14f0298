"""Who decodes the coming rollout without drafts, and what TLT saved in the last one: decisions with their inputs."""

import logging
from collections.abc import Mapping, Sequence

from verl_tlt.config import SpeculationConfig
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.decision import RunDecision
from verl_tlt.speculation.savings import ControlRollouts, SavingsAccount, Times
from verl_tlt.speculation.types import OFF

logger = logging.getLogger(__name__)


class SpeculationControl:
    """Decides before every rollout who drafts, and learns from every rollout.

    `replicas` are in a fixed order; `shared`: on one machine. `active_share` is the policy's
    (`drafter.policy.active_share`).
    """

    def __init__(self, replicas: list[str], config: SpeculationConfig, shared: bool, active_share: float) -> None:
        self.replicas = replicas
        self.decision = RunDecision(self.replicas, config.policy, config.source, active_share, config.arms)
        self.saving = self.decision.rollout.saving
        self.account = SavingsAccount(shared, active_share)
        self._controls = ControlRollouts(self.replicas, config.control_every, shared)
        self.control: Sequence[str] = ()
        """Replicas whose coming rollout is a control rollout."""
        self._undrafted: Sequence[str] = ()
        self.off = ""
        """Why no replica drafts in the coming rollout; empty: one does."""
        self._shared = shared
        self._never = "the settings turn speculation off" if not config.enable or config.policy == "off" else ""

    @property
    def disabled(self) -> str:
        """Why speculation is disabled since it did not pay; empty: it is not."""
        return self.decision.cause

    @property
    def undrafted_since(self) -> str:
        """Why nothing is drafted, by the settings or since it did not pay; empty: drafting is allowed."""
        return self._never or self.decision.rollout.never or self.decision.cause

    @property
    def may_train(self) -> bool:
        """Whether drafters may be trained during the coming rollout: not on processors that a control rollout needs."""
        return not (self._shared and self.control)

    def calibrated(self, table: LatencyTable) -> None:
        self.decision.rollout.calibrated(table)
        if not self._never and (why := self.decision.rollout.never):
            logger.warning("Nothing is drafted in this run: %s.", why)
        self.account.calibrated(table.by_batch(OFF))

    def undrafted(self, step: int, acceptance: Sequence[float]) -> list[str]:
        """Replicas that decode the rollout of `step` without drafts.

        `acceptance` is the served drafter's conditional acceptance by draft position, empty where it is unknown.
        """
        drafting = self.decision.drafting(acceptance)
        self.off = "" if drafting else self.disabled or self.decision.rollout.against
        wanted = len(drafting) == len(self.replicas) and not self.disabled  # else the others are the measure
        self.control = self._controls.chosen(step) if wanted else ()
        self._undrafted = [name for name in self.replicas if name not in drafting or name in self.control]
        return list(self._undrafted)

    def rollout_ended(self, stats: Mapping[str, EngineStats], training: Times = ()) -> float | None:
        """Seconds that TLT saved in a rollout during which replicas trained at some `Times`; None: unknown."""
        savings = self.account.rollout(stats, training)
        self._controls.ended(self._undrafted, bool(training), savings != (None, None))
        if notice := self.decision.learn(stats, savings.gain):
            logger.warning("%s", notice)
        return savings.saved_s
