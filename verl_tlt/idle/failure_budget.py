"""Which replicas' spot workers may be tried now, after failures."""

from __future__ import annotations

from dataclasses import dataclass

from verl_tlt.speculation.retry import next_wait

MAX_FAILURES = 3
"""Failed sessions in a row after which a replica's spot training is given up, and tried again only now and then."""


@dataclass
class _Streak:
    """Failures of one replica with no success between them."""

    failures: int = 0
    wait: int = 0  # RL steps that it is left alone for
    resume_at: int = 0


class FailureBudget:
    """A replica's spot workers pause after a failure, and are given up after `MAX_FAILURES` in a row.

    Counted per replica, so that one bad device neither stops the others nor hides behind their successes. The pause
    is in RL steps (1, 2, then `next_wait`): a step holds at most one session per replica.
    """

    def __init__(self) -> None:
        self._streaks: dict[str, _Streak] = {}

    def allows(self, replica: str, step: int) -> bool:
        return replica not in self._streaks or step >= self._streaks[replica].resume_at

    def succeeded(self, replica: str) -> bool:
        """A session ended well, so earlier failures count no more. Returns whether the replica had been given up."""
        streak = self._streaks.pop(replica, _Streak())
        return streak.failures >= MAX_FAILURES

    def failed(self, replica: str, step: int) -> int:
        """A session failed in this step. Returns for how many steps it is given up; 0: it only pauses."""
        streak = self._streaks.setdefault(replica, _Streak())
        streak.failures += 1
        off = streak.failures >= MAX_FAILURES
        before = streak.wait if streak.failures > MAX_FAILURES else 0
        streak.wait = next_wait(before) if off else 2 ** (streak.failures - 1)
        streak.resume_at = step + streak.wait + 1
        return streak.wait if off else 0

    @property
    def off(self) -> frozenset[str]:
        return frozenset(name for name, streak in self._streaks.items() if streak.failures >= MAX_FAILURES)
