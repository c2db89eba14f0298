"""The acceptance rate of each draft position, learned from every verified draft.

A step at K informs every shorter draft as well. Positions beyond the K in use are not observed; they keep their
measured ratio to the position before. Age is counted in drafts or request-steps, so that any batch is treated alike.
"""

import math
from collections.abc import Sequence

from verl_tlt.speculation.types import ControlError

FIRST_GUESS = 0.5
"""Conditional acceptance of the first position when nothing is known."""
DECAY_GUESS = 0.95
"""Conditional acceptance of a position relative to the one before it when nothing is known (EAGLE heads: 0.8-1)."""
WINDOW_DRAFTS, WINDOW_STEPS = 600.0, 16.0
"""Drafts and engine steps after which evidence counts 1/e; the longer of the two windows holds."""
RECENT_DRAFTS, RECENT_STEPS = 32.0, 4.0
"""Such a window for recent evidence, which the rest is compared with: a few long responses may be unlike a batch."""
CONTRADICTS = 3.0
"""Standard deviations between the recent rate and the whole evidence's, beyond which only the recent one counts."""
STALE_AFTER = 4000.0
"""Drafts (or request-steps without one) that do not reach a position until its evidence counts half."""
_RATIO_DRAFTS = 16.0
"""Drafts that did not reach a position which count as one vote for its ratio to the one before."""


def expected_accept_lengths(conditional: Sequence[float], longest: int) -> Sequence[float]:
    """τ(0), τ(1), ... τ(`longest`) before a draft, by a prior as `AcceptanceEstimate.set_prior` takes it."""
    estimate = AcceptanceEstimate(longest)
    estimate.set_prior(conditional)
    return estimate.accept_lengths


class AcceptanceEstimate:
    """Conditional acceptance at each of so many draft positions, and the accept length τ(K) that follows from it."""

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self._drafts = 0.0
        self._skipped = 0.0
        self.set_prior([])

    def set_prior(self, conditional: Sequence[float], weight: float = 2.0) -> None:
        """Start again from an expectation, worth so many drafts, for example the drafter's own held-out acceptance.

        `conditional`: P(position i accepted | all before accepted), in 0..1 (else ControlError); `DECAY_GUESS`
        continues it.
        """
        wrong = [p for p in conditional if not 0.0 <= p <= 1.0]
        if wrong:
            raise ControlError(f"Acceptance probabilities must lie in 0..1, not {wrong[0]}.")
        guess = list(conditional[: self.positions])
        while len(guess) < self.positions:
            guess.append(guess[-1] * DECAY_GUESS if guess else FIRST_GUESS)
        self._weight = weight if conditional else 2.0
        # Positions after one that is never accepted were not observed: their zeros are no ratio.
        self._ratio = [p / before if before else DECAY_GUESS for p, before in zip(guess, [1.0, *guess], strict=False)]
        self._trials, self._hits = [0.0] * self.positions, [0.0] * self.positions
        self._recent_trials, self._recent_hits = [0.0] * self.positions, [0.0] * self.positions
        self._observed_at = [self._drafts] * self.positions
        self._skipped_at = [self._skipped] * self.positions
        self._refresh()

    def observe(self, drafts: int, accepted: Sequence[int]) -> None:
        """Learn from so many drafts; accepted[i] of them had their first i+1 tokens accepted, of K = len(accepted)."""
        if drafts <= 0 or not accepted:
            return
        keep = math.exp(-min(drafts / WINDOW_DRAFTS, 1.0 / WINDOW_STEPS))
        recent = max(RECENT_DRAFTS, RECENT_STEPS * drafts)
        keep_recent, trials = math.exp(-drafts / recent), drafts
        for i, hits in enumerate(accepted[: self.positions]):
            age = self._age(i)
            if age > 0.05 * STALE_AFTER:
                self._trials[i] *= _freshness(age)
                self._hits[i] *= _freshness(age)
            self._observed_at[i], self._skipped_at[i] = self._drafts + drafts, self._skipped
            if trials <= 0:
                continue
            hits = min(hits, trials)
            self._trials[i] = self._trials[i] * keep + trials
            self._hits[i] = self._hits[i] * keep + hits
            # Of a larger batch's evidence no more than the window's counts: it would outweigh many steps of this one.
            before = self._recent_trials[i]
            kept = keep_recent if before <= recent else keep_recent * recent / before
            self._recent_trials[i] = before * kept + trials
            self._recent_hits[i] = self._recent_hits[i] * kept + hits
            if self._contradicted(i):
                self._trials[i], self._hits[i] = self._recent_trials[i], self._recent_hits[i]
                # Where a first draft is harder, so are those after it: they are known by their ratio until seen again.
                rest = [0.0] * (self.positions - i - 1)
                for evidence in (self._trials, self._hits, self._recent_trials, self._recent_hits):
                    evidence[i + 1 :] = rest
            trials = hits
        self._drafts += drafts
        self._refresh(observed=min(len(accepted), self.positions))

    def skip(self, requests: int) -> None:
        """Count decode-phase requests of a step without drafts: every estimate ages."""
        self._skipped += requests

    def accept_length_uncertainty(self) -> list[float]:
        """Standard deviation of τ(0), τ(1), ... with independent errors of the positions."""
        sigma = [self.uncertainty(i) / max(p, 1e-3) for i, p in enumerate(self.conditional)]
        # dτ(K)/dp_i = (τ(K) - τ(i)) / p_i
        return [
            math.sqrt(sum(((self.accept_lengths[k] - self.accept_lengths[i]) * sigma[i]) ** 2 for i in range(k)))
            for k in range(self.positions + 1)
        ]

    def uncertainty(self, position: int) -> float:
        """Standard deviation of one position's acceptance rate; grows with the age of its evidence."""
        n = self._trials[position] * _freshness(self._age(position)) + self._weight
        p = (self.conditional[position] * n + 0.5) / (n + 1.0)
        return math.sqrt(p * (1.0 - p) / (n + 1.0))

    def _contradicted(self, i: int) -> bool:
        """Whether the recent rate of position `i` is too far from that of its whole evidence to be chance."""
        n, recent = self._trials[i], self._recent_trials[i]
        p = (self._hits[i] + 1.0) / (n + 2.0)
        gap = self._recent_hits[i] - p * recent
        return n > recent and gap * gap > CONTRADICTS * CONTRADICTS * p * (1.0 - p) * recent

    def _age(self, i: int) -> float:
        """Drafts and request-steps since position `i` was last observed."""
        return self._drafts - self._observed_at[i] + self._skipped - self._skipped_at[i]

    def _refresh(self, observed: int = 0) -> None:
        """Recompute means and τ; the ratio of an observed position to the one before follows the evidence."""
        mean: list[float] = []
        tau, chain, before = [1.0], 1.0, 1.0
        for i in range(self.positions):
            # The longer a position was not observed, the more its ratio to the one before counts.
            unobserved = self._drafts - self._observed_at[i]
            fresh, votes = _freshness(unobserved), self._weight + unobserved / _RATIO_DRAFTS
            n = self._trials[i] * fresh
            p = (self._hits[i] * fresh + votes * min(1.0, before * self._ratio[i])) / (n + votes)
            if i < observed and n > 10.0 * self._weight:
                self._ratio[i] = p / max(before, 1e-6)
            mean.append(p)
            chain *= p
            tau.append(tau[-1] + chain)
            before = p
        self.conditional: Sequence[float] = mean
        """P(position i accepted | all before accepted), one per position."""
        self.accept_lengths: Sequence[float] = tau
        """τ(0), τ(1), ... τ(positions): tokens per request and step, the bonus token included."""


def _freshness(age: float) -> float:
    return STALE_AFTER / (STALE_AFTER + age)
