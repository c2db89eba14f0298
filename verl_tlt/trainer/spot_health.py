"""Which replicas may train the drafter now; says so when one is given up, and when TLT has nothing left to do.

The rule is `idle.failure_budget`'s.
"""

from __future__ import annotations

import logging

from verl_tlt.idle.failure_budget import MAX_FAILURES, FailureBudget
from verl_tlt.trainer.step_log import StepLog

logger = logging.getLogger(__name__)


class SpotHealth:
    """Failures and successes of replicas' spot workers over the run."""

    def __init__(self, log: StepLog) -> None:
        self._log, self._budget = log, FailureBudget()
        self.none = "spot training has not started"
        """Why nobody trains in this run; empty: it was set up."""
        self._said = False

    def allows(self, replica: str, step: int) -> bool:
        """Whether its spot workers may train in this RL step."""
        return self._budget.allows(replica, step)

    def failed(self, replica: str, step: int, error: str) -> None:
        """They failed, in a session or outside one."""
        if wait := self._budget.failed(replica, step):
            logger.error(
                "spot training on %s is given up for %d steps, after %d or more failures in a row; the last one: %s",
                replica, wait, MAX_FAILURES, error,
            )  # fmt: skip
            self._log.training_stopped(step, replica, error)

    def succeeded(self, replica: str, step: int) -> None:
        """A session ended well."""
        if self._budget.succeeded(replica):
            logger.warning("spot training on %s, which was given up, works again", replica)
            self._log.training_stopped(step, replica, "")

    @property
    def off(self) -> frozenset[str]:
        """Replicas that are given up."""
        return self._budget.off

    def untrained(self, replicas: int) -> str:
        """Why none of so many replicas trains; empty: one may."""
        return self.none or ("spot training is given up on every replica" if len(self.off) >= replicas else "")

    def say_if_idle(self, untrained: str, undrafted: str) -> None:
        """Say, once, that nothing is trained and nothing drafted, if there is a reason for both."""
        if untrained and undrafted and not self._said:
            self._said = True
            logger.error("TLT does nothing for this run any more: %s, and %s", untrained, undrafted)
