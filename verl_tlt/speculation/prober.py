"""Which draft length is worth trying although the estimates do not favour it, for how long, and how often.

An arm is a candidate only if it could beat the one in use, given how uncertain or stale its estimate is, and if the
budget can pay for the goodput the attempt will probably cost. Near neighbours come first.

The budget is an allowance that accrues with every step and is capped, so that probing can never take more than its
share of the engine's time. An interval per subject doubles with every probe, so that asking the same question again and
again becomes rare, and starts anew when an answer changed something.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from verl_tlt.speculation.acceptance import AcceptanceEstimate
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.types import Load

_BLIND = "blind"
"""Subject of the probes that ask whether a drafter that was not looked at for long has become useful."""
_WORTHWHILE = 1.01
"""Relative goodput an arm must be able to have for a probe."""
_FEE = 0.05
"""Steps charged for any probe."""
_SHARP = 0.02
"""Relative uncertainty of a latency below which a probe is about acceptance alone."""
_ENOUGH_DRAFTS, _MOST_STEPS = 8, 8
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
        if self._allowance < _CAP:
            self._allowance += self._share

    def due(self, subject: Hashable) -> bool:
        """Whether the subject's interval is over."""
        return self._steps >= self._next.get(subject, 0)

    def affords(self, price: float) -> bool:
        """Whether a probe of `price` steps could be paid for now."""
        return price <= self._allowance

    def spend(self, subject: Hashable, price: float) -> bool:
        """Pay for a probe of `price` steps and start the subject's next interval; False when it is too dear now."""
        if not self.affords(price):
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


class Probe(NamedTuple):
    """An arm to use for some steps."""

    arm: int
    """Index into the arms."""
    steps: int


class Proposal(NamedTuple):
    """A probe and what it is to be paid with."""

    probe: Probe
    subject: Hashable
    """Whose interval begins anew."""
    price: float
    """Steps of goodput it will probably cost."""


class Situation(NamedTuple):
    """What the policy believes at one load; lists by arm."""

    load: Load
    current: int
    """Arm in use."""
    reachable: int
    """Arms below this index may be used."""
    seconds: Sequence[float]
    """Expected step latency."""
    goodput: Sequence[float]
    """Expected tokens per second and request."""
    best: int
    """Arm of the highest goodput within reach."""


class Prober:
    """Finds probes.

    Args:
        arms: draft lengths.
        acceptance: the policy's estimate.
        latency: the policy's model.
        budget: what may be spent.
        optimism: standard deviations by which an estimate is stretched.
    """

    def __init__(
        self,
        arms: Sequence[int],
        acceptance: AcceptanceEstimate,
        latency: LatencyModel,
        budget: ProbeBudget,
        optimism: float,
    ) -> None:
        self._arms, self._acceptance, self._latency = tuple(arms), acceptance, latency
        self.budget, self._optimism = budget, optimism

    def find(self, here: Situation, surcharge: float) -> Proposal | None:
        """The probe to make now, which the budget can bear; None in nearly every step.

        Args:
            here: beliefs at the present load.
            surcharge: what a change of K costs beyond its two halves, in steps.
        """
        if here.current == 0 and len(self._arms) > 1 and self.budget.due(_BLIND):
            look = self._look_again(here, surcharge)
            if look is not None:
                return look
        octave = here.load.batch.bit_length()
        nearest_first = (*range(here.current + 1, here.reachable), *range(here.current - 1, -1, -1))
        due = [arm for arm in nearest_first if self.budget.due((arm, octave))]
        if not due:
            return None
        sigmas = self._latency.uncertainty(here.load.batch, here.load.kv_tokens)[1:]
        for arm, hope in zip(due, self._hopes(here, due, sigmas), strict=True):
            if hope > here.goodput[here.current] * _WORTHWHILE:
                steps = self._steps(here.load, sigmas[arm])
                price = _price(here, arm, steps, surcharge)
                if self.budget.affords(price):
                    return Proposal(Probe(arm, steps), (arm, octave), price)
        return None

    def looked(self) -> None:
        """A draft was verified: the drafter has been seen."""
        self.budget.rest(_BLIND)

    def news(self, *arms: int, batch: int) -> None:
        """K changed between these arms: their intervals, and those of looking again, begin anew."""
        for subject in (*((arm, batch.bit_length()) for arm in arms), _BLIND):
            self.budget.restart(subject)

    def _hopes(self, here: Situation, due: Sequence[int], sigmas: Sequence[float]) -> list[float]:
        """Goodput each arm could have at best, within reason."""
        tau, spread = self._acceptance.accept_lengths(), self._acceptance.accept_length_uncertainty()
        at_best = self._latency.optimistic(here.load.batch, here.load.kv_tokens)[1:]
        hopes = []
        for arm in due:
            k, longer = self._arms[arm], arm > here.current
            # Of shorter drafts the acceptance is known: it is part of what the longer one shows.
            vague = spread[k] / tau[k] if longer else 0.0
            hope = tau[k] / at_best[arm] * (1.0 + self._optimism * math.hypot(sigmas[arm], vague))
            if longer:
                # However little is known of its latency, a longer draft is not hoped to be cheaper than this one.
                cheapest = min(here.seconds[arm], here.seconds[here.current])
                hope = min(hope, (tau[k] + self._optimism * spread[k]) / cheapest)
            hopes.append(hope)
        return hopes

    def _look_again(self, here: Situation, surcharge: float) -> Proposal | None:
        """After a long time at K=0, one look with the shortest draft, if a perfect drafter would pay here."""
        perfect = (self._arms[1] + 1) / here.seconds[1]
        if here.reachable < 2 or perfect <= _WORTHWHILE * here.goodput[0]:
            return None
        steps = self._steps(here.load, 0.0)
        price = _price(here, 1, steps, surcharge)
        return Proposal(Probe(1, steps), _BLIND, price) if self.budget.affords(price) else None

    def _steps(self, load: Load, sigma: float) -> int:
        """Steps a probe needs: a few drafts to judge acceptance, clean steps to judge latency if that is vague."""
        drafts = min(_MOST_STEPS, -(-_ENOUGH_DRAFTS // load.batch))
        if sigma <= _SHARP:
            return drafts
        return max(drafts, 1 + max(2, min(12, round((self._latency.jitter / _SHARP) ** 2))))


def _price(here: Situation, arm: int, steps: int, surcharge: float) -> float:
    """Steps of goodput lost: while probing, and by changing K there and back."""
    return steps * max(0.0, 1.0 - here.goodput[arm] / here.goodput[here.current]) + 2.0 * surcharge + _FEE
