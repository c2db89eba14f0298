"""Which replicas' spot workers may be tried now, after failures."""

from __future__ import annotations

from dataclasses import dataclass

from verl_tlt.speculation.retry import next_wait

MAX_FAILURES = 3
"""Failed sessions in a row after which a replica's spot training is given up, and tried again only now and then."""


@dataclass
class _Row:
    failures: int = 0
    wait: int = 0  # RL steps that it is left alone for
    resume_at: int = 0


class FailureBudget:
    """A replica's spot workers pause after a failure, and are given up after `MAX_FAILURES` in a row.

    Counted per replica, so that one bad device neither stops the others nor hides behind their successes. The pause
    is in RL steps (1, 2, then `next_wait`): a step holds at most one session per replica.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def allows(self, replica: str, step: int) -> bool:
        return replica not in self._rows or step >= self._rows[replica].resume_at

    def succeeded(self, replica: str) -> bool:
        """A session ended well: the row is broken. Returns whether the replica had been given up."""
        row = self._rows.pop(replica, _Row())
        return row.failures >= MAX_FAILURES

    def failed(self, replica: str, step: int) -> int:
        """A session failed in this step. Returns for how many steps it is given up; 0: it only pauses."""
        row = self._rows.setdefault(replica, _Row())
        row.failures += 1
        off = row.failures >= MAX_FAILURES
        row.wait = next_wait(row.wait if row.failures > MAX_FAILURES else 0) if off else 2 ** (row.failures - 1)
        row.resume_at = step + row.wait + 1
        return row.wait if off else 0

    @property
    def off(self) -> frozenset[str]:
        return frozenset(name for name, row in self._rows.items() if row.failures >= MAX_FAILURES)
