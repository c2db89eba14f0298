"""Who decodes the coming rollout without drafts, and what TLT saved in the last one: decisions with their inputs."""

import logging
from collections.abc import Mapping, Sequence

from verl_tlt.config import SpeculationConfig
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.off import OffDecision, saved_estimate_s

logger = logging.getLogger(__name__)


class SpeculationControl:
    """Decides before every rollout who drafts, and learns from every rollout.

    `replicas` are in a fixed order.
    """

    def __init__(self, replicas: list[str], config: SpeculationConfig) -> None:
        self.replicas = replicas
        self.decision = OffDecision(self.replicas, config.policy, config.source)
        self.off = ""
        """Why no replica drafts in the coming rollout; empty: one does."""
        self._never = "the settings turn speculation off" if not config.enable or config.policy == "off" else ""

    @property
    def disabled(self) -> str:
        """Why speculation is disabled since it did not pay; empty: it is not."""
        return self.decision.cause

    def calibrated(self, table: LatencyTable) -> None:
        self.decision.calibrated(table)
        if not self._never and (why := self.decision.never):
            logger.warning("Nothing is drafted in this run: %s.", why)

    def undrafted(self, step: int, acceptance: Sequence[float]) -> list[str]:
        """Replicas that decode the rollout of `step` without drafts.

        `acceptance` is the served drafter's conditional acceptance by draft position, empty where it is unknown.
        """
        drafting = self.decision.drafting(acceptance)
        self.off = "" if drafting else self.disabled or self.decision.against
        return [name for name in self.replicas if name not in drafting]

    def rollout_ended(self, stats: Mapping[str, EngineStats]) -> float | None:
        """Estimated seconds that drafts saved in a rollout; `stats` are the engines' sums by replica.

        None where an engine has no figures.
        """
        if notice := self.decision.rollout_ended(stats):
            logger.warning("%s", notice)
        return saved_estimate_s(stats)
