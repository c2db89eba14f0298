"""Which draft length to try although the estimates do not favour it, for how many steps, and how often.

An arm is a candidate only if it could beat the one in use, given how uncertain or old its estimate is, and if the
budget allows the goodput that the attempt will probably cost. Near neighbours come first.

The budget is an allowance that grows with every step and is capped, so that probing never takes more than its share of
the engine's time. An interval per subject doubles with every probe, so that the same arm is tried rarely, and is reset
when K changes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from verl_tlt.speculation.acceptance import AcceptanceEstimate
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.types import Load

PROBE_SHARE = 0.004
"""Share of the engine's time that probing may cost."""
PROBE_INTERVAL, PROBE_INTERVAL_MAX = 64, 512
"""Steps between two probes of a subject: at first, and where the doubling ends. The latter is how late a drafter that
became useful is noticed at worst."""
OPTIMISM = 1.25
"""Standard deviations by which an estimate is raised to see whether a probe could pay."""
UNUSED_DRAFTER = "unused drafter"
"""Subject of the probes that ask whether a drafter that has not drafted for long has become useful."""
_WORTHWHILE = 1.01
"""Relative goodput over the arm in use that an arm must be able to have."""
_FEE = 0.05
"""Steps charged for any probe."""
_SHARP = 0.02
"""Relative uncertainty of a latency below which a probe is about acceptance alone."""
_ENOUGH_DRAFTS, _MOST_STEPS = 8, 8
_START, _CAP = 1.0, 8.0
"""Steps of lost goodput granted at start, and how many may be saved up."""


class ProbeBudget:
    """Allowance and intervals of probes; arguments as the constants they default to."""

    def __init__(
        self, share: float = PROBE_SHARE, interval: int = PROBE_INTERVAL, interval_max: int = PROBE_INTERVAL_MAX
    ) -> None:
        self._share, self._interval, self._interval_max = share, interval, interval_max
        self._allowance = _START
        self._steps = 0
        self._next: dict[Hashable, int] = {}
        self._wait: dict[Hashable, int] = {}

    def step(self) -> None:
        """Count one engine step."""
        self._steps += 1
        if self._allowance < _CAP:
            self._allowance += self._share

    def due(self, subject: Hashable) -> bool:
        """Whether the subject's interval is over."""
        return self._steps >= self._next.get(subject, 0)

    def affords(self, price: float) -> bool:
        """Whether a probe of `price` steps is within the allowance now."""
        return price <= self._allowance

    def spend(self, subject: Hashable, price: float) -> bool:
        """Take `price` steps for a probe and start the subject's next interval; False when that is too much now."""
        if not self.affords(price):
            return False
        self._allowance -= price
        wait = self._wait.get(subject, self._interval)
        self._next[subject] = self._steps + wait
        self._wait[subject] = min(2 * wait, self._interval_max)
        return True

    def postpone(self, subject: Hashable) -> None:
        """Start the subject's interval again from now, without doubling it."""
        self._next[subject] = self._steps + self._wait.get(subject, self._interval)

    def reset(self, subject: Hashable) -> None:
        """Let the subject's intervals begin small again after the current one."""
        self._wait.pop(subject, None)

    def clear(self) -> None:
        """Make every subject due now."""
        self._next.clear()
        self._wait.clear()


class ProbeRun(NamedTuple):
    """An arm to use for some steps."""

    arm: int
    """Index into the arms."""
    steps: int


class ProbeCandidate(NamedTuple):
    """A probe that could be made, and what it is charged to."""

    run: ProbeRun
    subject: Hashable
    """Whose interval it starts."""
    price: float
    """Steps of goodput that it will probably cost."""


class LoadEstimates(NamedTuple):
    """What the policy estimates at one load; lists by arm."""

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
    """Arm of the highest goodput among those that may be used."""


class Prober:
    """Finds probes by the policy's estimates."""

    def __init__(
        self,
        arms: Sequence[int],
        acceptance: AcceptanceEstimate,
        latency: LatencyModel,
        budget: ProbeBudget,
        optimism: float = OPTIMISM,
    ) -> None:
        self._arms, self._acceptance, self._latency = tuple(arms), acceptance, latency
        self.budget, self._optimism = budget, optimism

    def find(self, here: LoadEstimates) -> ProbeCandidate | None:
        """The probe to make now, within the budget; None in nearly every step."""
        if here.current == 0 and len(self._arms) > 1 and self.budget.due(UNUSED_DRAFTER):
            candidate = self._unused_drafter(here)
            if candidate is not None:
                return candidate
        octave = here.load.batch.bit_length()
        nearest_first = (*range(here.current + 1, here.reachable), *range(here.current - 1, -1, -1))
        due = [arm for arm in nearest_first if self.budget.due((arm, octave))]
        if not due:
            return None
        sigmas = self._latency.uncertainty(here.load.batch, here.load.kv_tokens)[1:]
        for arm, hope in zip(due, self._at_best(here, due, sigmas), strict=True):
            if hope > here.goodput[here.current] * _WORTHWHILE:
                steps = self._steps(here.load, sigmas[arm])
                price = _price(here, arm, steps)
                if self.budget.affords(price):
                    return ProbeCandidate(ProbeRun(arm, steps), (arm, octave), price)
        return None

    def drafted(self) -> None:
        """A draft was verified: the drafter is in use."""
        self.budget.postpone(UNUSED_DRAFTER)

    def k_changed(self, *arms: int, batch: int) -> None:
        """K changed between these arms: they may be probed soon again."""
        for subject in (*((arm, batch.bit_length()) for arm in arms), UNUSED_DRAFTER):
            self.budget.reset(subject)

    def _at_best(self, here: LoadEstimates, due: Sequence[int], sigmas: Sequence[float]) -> list[float]:
        """Goodput that each arm could have at best, given the uncertainty of its estimates."""
        tau, spread = self._acceptance.accept_lengths(), self._acceptance.accept_length_uncertainty()
        hopes = []
        for arm in due:
            k, longer = self._arms[arm], arm > here.current
            # The acceptance of a shorter draft is known: it is part of what the longer one shows.
            vague = spread[k] / tau[k] if longer else 0.0
            hope = tau[k] / here.seconds[arm] * (1.0 + self._optimism * math.hypot(sigmas[arm], vague))
            if longer:
                # However uncertain its latency is, a longer draft is not expected to be cheaper than the current one.
                cheapest = min(here.seconds[arm], here.seconds[here.current])
                hope = min(hope, (tau[k] + self._optimism * spread[k]) / cheapest)
            hopes.append(hope)
        return hopes

    def _unused_drafter(self, here: LoadEstimates) -> ProbeCandidate | None:
        """After a long time at K=0, one probe of the shortest draft, if a perfect drafter would pay here."""
        perfect = (self._arms[1] + 1) / here.seconds[1]
        if here.reachable < 2 or perfect <= _WORTHWHILE * here.goodput[0]:
            return None
        steps = self._steps(here.load, 0.0)
        price = _price(here, 1, steps)
        return ProbeCandidate(ProbeRun(1, steps), UNUSED_DRAFTER, price) if self.budget.affords(price) else None

    def _steps(self, load: Load, sigma: float) -> int:
        """Steps that a probe needs: a few drafts for acceptance, clean steps for latency if that is uncertain."""
        drafts = min(_MOST_STEPS, -(-_ENOUGH_DRAFTS // load.batch))
        if sigma <= _SHARP:
            return drafts
        return max(drafts, 1 + max(2, min(12, round((self._latency.jitter / _SHARP) ** 2))))


def _price(here: LoadEstimates, arm: int, steps: int) -> float:
    """Steps of goodput that a probe loses."""
    return steps * max(0.0, 1.0 - here.goodput[arm] / here.goodput[here.current]) + _FEE
