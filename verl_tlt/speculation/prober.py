"""Which draft length to try although the estimates do not favour it, for how many steps, and how often.

A draft length is a candidate only if it could beat the one in use, given how uncertain or old its estimate is, and if
the budget allows the goodput that the attempt will probably cost. Near neighbours come first.
"""

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
"""Relative goodput over the draft length in use that another draft length must be able to have."""
_FEE = 0.05
"""Steps charged for any probe."""
_SHARP = 0.02
"""Relative uncertainty of a latency below which a probe is about acceptance alone."""
_ENOUGH_DRAFTS, _MOST_STEPS = 8, 8
_START, _CAP = 0.25, 8.0
"""Steps of lost goodput granted at start, and how many may be saved up. A job of few short rollouts has no time to
win back what it tried."""


class ProbeBudget:
    """What probing may cost: an allowance, which grows with every step up to a cap, and an interval per subject.

    The interval doubles with every probe, and is reset when K changes.
    """

    def __init__(
        self, share: float = PROBE_SHARE, interval: int = PROBE_INTERVAL, interval_max: int = PROBE_INTERVAL_MAX
    ) -> None:
        self._share, self._interval, self._interval_max = share, interval, interval_max
        self._allowance = _START
        self._steps = 0
        self._next: dict[Hashable, int] = {}
        self._wait: dict[Hashable, int] = {}

    def step(self) -> None:
        self._steps += 1
        if self._allowance < _CAP:
            self._allowance += self._share

    def due(self, subject: Hashable) -> bool:
        return self._steps >= self._next.get(subject, 0)

    def affords(self, price: float) -> bool:
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

    def drafted(self) -> None:
        """A draft was verified: the drafter is in use, and its interval begins again without doubling."""
        self._next[UNUSED_DRAFTER] = self._steps + self._wait.get(UNUSED_DRAFTER, self._interval)

    def k_changed(self, lengths: Sequence[int], batch: int) -> None:
        """K changed between these lengths: after the current interval they may be probed soon again."""
        for subject in (*((choice, batch.bit_length()) for choice in lengths), UNUSED_DRAFTER):
            self._wait.pop(subject, None)

    def clear(self) -> None:
        """Make every subject due now."""
        self._next.clear()
        self._wait.clear()


class Probe(NamedTuple):
    """A draft length to use for some steps, and what that is charged to."""

    choice: int  # index into the lengths
    steps: int
    subject: Hashable = None  # whose interval it starts
    price: float = 0.0  # steps of goodput that it will probably cost


class LoadEstimates(NamedTuple):
    """What the policy estimates at one load; lists by draft length."""

    load: Load
    current: int  # index of the draft length in use
    reachable: int  # draft lengths below this index may be used
    seconds: Sequence[float]  # expected step latency
    goodput: Sequence[float]  # expected tokens per second and request
    best: int  # the one of highest goodput among those that may be used

    def probe(self, choice: int, steps: int, subject: Hashable) -> Probe:
        lost = max(0.0, 1.0 - self.goodput[choice] / self.goodput[self.current])
        return Probe(choice, steps, subject, steps * lost + _FEE)


def find_probe(
    here: LoadEstimates,
    lengths: Sequence[int],
    acceptance: AcceptanceEstimate,
    latency: LatencyModel,
    budget: ProbeBudget,
) -> Probe | None:
    """The probe to make now, within the budget; None in nearly every step."""
    if here.current == 0 and here.reachable > 1 and budget.due(UNUSED_DRAFTER):
        # After a long time at K=0, the shortest draft, if a perfect drafter would pay here.
        probe = here.probe(1, _steps(here.load, 0.0, latency.jitter), UNUSED_DRAFTER)
        if (lengths[1] + 1) / here.seconds[1] > _WORTHWHILE * here.goodput[0] and budget.affords(probe.price):
            return probe
    octave = here.load.batch.bit_length()
    nearest_first = (*range(here.current + 1, here.reachable), *range(here.current - 1, -1, -1))
    due = [choice for choice in nearest_first if budget.due((choice, octave))]
    if not due:
        return None
    sigmas = latency.uncertainty(here.load.batch, here.load.kv_tokens)[1:]
    tau, spread = acceptance.accept_lengths, acceptance.accept_length_uncertainty()
    for choice in due:
        k = lengths[choice]
        if at_best(here, choice, tau[k], spread[k], sigmas[choice]) > here.goodput[here.current] * _WORTHWHILE:
            probe = here.probe(choice, _steps(here.load, sigmas[choice], latency.jitter), (choice, octave))
            if budget.affords(probe.price):
                return probe
    return None


def at_best(here: LoadEstimates, choice: int, tau: float, spread: float, sigma: float) -> float:
    """Goodput of a draft length if accept length (`spread`) and latency (`sigma`) are `OPTIMISM` deviations better."""
    longer = choice > here.current
    # The acceptance of a shorter draft is known: it is part of what the longer one shows.
    vague = spread / tau if longer else 0.0
    hope = tau / here.seconds[choice] * (1.0 + OPTIMISM * math.hypot(sigma, vague))
    if not longer:
        return hope
    # However uncertain its latency is, a longer draft is not expected to be cheaper than the current one.
    return min(hope, (tau + OPTIMISM * spread) / min(here.seconds[choice], here.seconds[here.current]))


def _steps(load: Load, sigma: float, jitter: float) -> int:
    """Steps that a probe needs: a few drafts for acceptance, clean steps for latency if that is uncertain."""
    drafts = min(_MOST_STEPS, -(-_ENOUGH_DRAFTS // load.batch))
    return drafts if sigma <= _SHARP else max(drafts, 1 + max(2, min(12, round((jitter / _SHARP) ** 2))))
