"""Which replicas' spot workers may be tried now, after failures."""

from verl_tlt.speculation.decision import FIRST_WAIT, LONGEST_WAIT

MAX_FAILURES = 3
"""Failed sessions in a row after which a replica's spot training is given up, and tried again only now and then."""


class FailureBudget:
    """A replica's spot workers pause after a failure, and are given up after `MAX_FAILURES` in a row.

    Counted per replica, so that one bad device neither stops the others nor hides behind their successes. The pause
    is in RL steps (1, 2, then from `FIRST_WAIT` to `LONGEST_WAIT`): a step holds at most one session per replica.
    """

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, int]] = {}  # by replica: failures in a row, step of the next try

    def allows(self, replica: str, step: int) -> bool:
        return step >= self._failed.get(replica, (0, step))[1]

    def succeeded(self, replica: str) -> bool:
        """A session ended well, so earlier failures count no more. Returns whether the replica had been given up."""
        return self._failed.pop(replica, (0, 0))[0] >= MAX_FAILURES

    def failed(self, replica: str, step: int) -> int:
        """A session failed in this step. Returns for how many steps it is given up; 0: it only pauses."""
        failures = self._failed.get(replica, (0, 0))[0] + 1
        off = failures >= MAX_FAILURES
        wait = min(FIRST_WAIT * 2 ** (failures - MAX_FAILURES), LONGEST_WAIT) if off else failures
        self._failed[replica] = failures, step + wait + 1
        return wait if off else 0

    @property
    def off(self) -> frozenset[str]:
        return frozenset(name for name, (failures, _) in self._failed.items() if failures >= MAX_FAILURES)
