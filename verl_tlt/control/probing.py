"""How often a policy may try a draft length just to learn: an allowance of time and intervals that double.

A probe costs the goodput it gives up. The allowance accrues with every step and is capped, so that probing can never
take more than its share of the engine's time; an interval per subject doubles with every probe, so that asking the
same question again and again becomes rare, and starts anew when an answer changed something.
"""

from __future__ import annotations

from collections.abc import Hashable

_CAP = 8.0
"""Steps of lost goodput that may be saved up."""
_START = 1.0
"""Steps of lost goodput granted at start."""


class ProbeBudget:
    """Allowance and intervals.

    Args:
        share: share of the time that probes may cost.
        interval: steps between the first two probes of a subject.
        interval_max: where the doubling ends.
    """

    def __init__(self, share: float, interval: int, interval_max: int) -> None:
        self._share, self._interval, self._interval_max = share, interval, interval_max
        self._allowance = _START
        self._steps = 0
        self._next: dict[Hashable, int] = {}
        self._wait: dict[Hashable, int] = {}
        self.spent = 0.0
        """Steps of goodput given up so far, by the estimates."""
        self.count = 0
        """Probes so far."""

    def step(self) -> None:
        """One engine step went by."""
        self._steps += 1
        self._allowance = min(self._allowance + self._share, _CAP)

    def due(self, subject: Hashable) -> bool:
        """Whether the subject's interval is over."""
        return self._steps >= self._next.get(subject, 0)

    def spend(self, subject: Hashable, price: float) -> bool:
        """Pay for a probe of `price` steps and start the subject's next interval; False when it is too dear now."""
        if price > self._allowance:
            return False
        self._allowance -= price
        self.spent += price
        self.count += 1
        self.postpone(subject)
        return True

    def postpone(self, subject: Hashable) -> None:
        """Start the subject's next, longer interval without a probe."""
        wait = self._wait.get(subject, self._interval)
        self._next[subject] = self._steps + wait
        self._wait[subject] = min(2 * wait, self._interval_max)

    def rest(self, subject: Hashable) -> None:
        """The question answered itself: its interval, unchanged, begins now."""
        self._next[subject] = self._steps + self._wait.get(subject, self._interval)

    def restart(self, subject: Hashable) -> None:
        """Let the subject's intervals begin small again; the current one runs on."""
        self._wait.pop(subject, None)

    def clear(self) -> None:
        """Everything may be asked again at once."""
        self._next.clear()
        self._wait.clear()
