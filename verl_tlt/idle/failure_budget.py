"""Which replicas' spot workers may still be tried after failures."""

from __future__ import annotations

MAX_FAILURES = 3
"""Failed sessions in a row after which a replica's spot training stays off for the run."""


class FailureBudget:
    """For the run: a replica's spot worker pauses after a failure, and stays off after `MAX_FAILURES` in a row.

    Kept per replica, so that one bad device neither stops the others nor hides behind their successes. The pause
    is counted in RL steps (1, 2, 4, ...): a step holds at most one session per replica.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._resume_at: dict[str, int] = {}

    def allows(self, replica: str, step: int) -> bool:
        """Whether the replica's worker may train in this RL step."""
        return replica not in self.off and step >= self._resume_at.get(replica, step)

    def succeeded(self, replica: str) -> None:
        """A session ended well: the row is broken."""
        if replica not in self.off:
            self._in_a_row.pop(replica, None)
            self._resume_at.pop(replica, None)

    def failed(self, replica: str, step: int) -> bool:
        """A session failed in this step. True the one time this used up the budget: say so loudly."""
        count = self._in_a_row[replica] = self._in_a_row.get(replica, 0) + 1
        self._resume_at[replica] = step + 2 ** (count - 1) + 1
        return count == MAX_FAILURES

    @property
    def off(self) -> frozenset[str]:
        """Replicas whose spot training stays off for the run."""
        return frozenset(name for name, count in self._in_a_row.items() if count >= MAX_FAILURES)
