"""Tokens placed in the distributions they should come from, two tests of them, and how much these tests would see.

* Places: each token's place among all tokens, likeliest first and by a random number within its own probability, is
  uniform between 0 and 1 if it was drawn (the probability integral transform). One chi-square test for each position of
  the responses. Sees any wrong frequency that goes with the rank of a token.
* Martingale: the sum of log p(token) + entropy(p) over every token. Each term has mean 0 given what came before if, and
  as far as log p can tell only if, the token was drawn from p; variances add up. Sees a small bias that lasts over long
  outputs, as a sampler has that accepts too willingly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

BINS, LEAST = 20, 5.0
"""Of places; a position is tested where each bin expects at least so many."""
FAILS = 1e-4
"""A correct engine has a p-value below it once in ten thousand settings."""
COPIES = 40
"""Sabotaged copies by which power is told."""


@dataclass(frozen=True)
class Judged:
    """For each token, flat: what Hugging Face's distribution says of it."""

    log_prob: np.ndarray
    mean: np.ndarray
    """Of log p over the whole distribution: minus its entropy."""
    variance: np.ndarray
    place: np.ndarray
    best: np.ndarray
    """Log-probability of the likeliest token there."""
    position: np.ndarray
    """In its response, from 0."""

    @classmethod
    def of_all(cls, parts: Sequence[Judged]) -> Judged:
        return cls(*(np.concatenate(fields) for fields in zip(*map(astuple, parts), strict=True)))

    def only(self, rows: np.ndarray) -> Judged:
        return Judged(*(field[rows] for field in astuple(self)))

    def impossible(self) -> int:
        return int((~np.isfinite(self.log_prob)).sum())

    def places(self) -> float:
        """p-value of the worst position, times their number (Bonferroni)."""
        from scipy.stats import chi2

        if self.impossible():
            return 0.0
        found = []
        for position in np.unique(self.position):
            places = self.place[self.position == position]
            expected = len(places) / BINS
            if expected >= LEAST:
                counts = np.bincount(np.minimum((places * BINS).astype(int), BINS - 1), minlength=BINS)
                found.append(float(chi2.sf(((counts - expected) ** 2 / expected).sum(), BINS - 1)))
        return min(1.0, max(1, len(found)) * min(found, default=1.0))

    def martingale(self) -> float:
        if self.impossible():
            return 0.0
        z = (self.log_prob - self.mean).sum() / math.sqrt(max(float(self.variance.sum()), 1e-12))
        return math.erfc(abs(float(z)) / math.sqrt(2.0))

    def p(self) -> float:
        return min(1.0, 2.0 * min(self.places(), self.martingale()))

    def sabotaged(self, share: float, random: np.random.Generator) -> Judged:
        """As if this share of the tokens had been the likeliest ones instead of drawn."""
        hit = random.random(len(self.place)) < share
        likeliest = np.exp(self.best) * random.random(len(self.place))
        return replace(
            self, log_prob=np.where(hit, self.best, self.log_prob), place=np.where(hit, likeliest, self.place)
        )

    def power(self, share: float, seed: int = 0) -> float:
        """Share of the copies sabotaged so whose p-value is below `FAILS`."""
        random = np.random.default_rng(seed)
        return sum(self.sabotaged(share, random).p() < FAILS for _ in range(COPIES)) / COPIES
