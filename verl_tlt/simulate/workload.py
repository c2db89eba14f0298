"""What a simulated rollout generates: response lengths from a distribution, or those that a run recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_tlt.errors import TLTError

Lengths = npt.NDArray[np.int64]


class SimulationError(TLTError, ValueError):
    """An input of the simulation cannot be; the message names it."""


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths, cut at the longest response: the long tail of reasoning."""

    median: float
    sigma: float
    longest: int

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.sigma >= 0 and self.longest >= 1):
            raise SimulationError(
                f"Response lengths need median > 0, sigma >= 0 and longest >= 1, not {self.median:g}, {self.sigma:g}, "
                f"{self.longest}."
            )

    def draw(self, rng: np.random.Generator, requests: int) -> Lengths:
        """Lengths in tokens, [requests]."""
        drawn = rng.lognormal(math.log(self.median), self.sigma, requests)
        return np.clip(drawn, 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Recorded:
    """Lengths of a run, drawn again and again with replacement."""

    values: Sequence[int]

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 1:
            raise SimulationError("Recorded response lengths must be one or more whole numbers above 0.")

    def draw(self, rng: np.random.Generator, requests: int) -> Lengths:
        """Lengths in tokens, [requests]."""
        return rng.choice(np.asarray(self.values, dtype=np.int64), requests)


Distribution = LogNormal | Recorded


def from_moments(mean: float, longest: float, clipped: float, requests: int, limit: int) -> LogNormal:
    """The cut log-normal that has a logged mean, and the logged longest response or share of cut ones.

    Args:
        mean: mean response length in tokens.
        longest: of a step's responses.
        clipped: share of them that reached the limit.
        requests: responses in a step.
        limit: longest response allowed.

    Raises:
        SimulationError: the mean is not between 1 and the limit.
    """
    if not 1 <= mean <= limit:
        raise SimulationError(f"A mean response length of {mean:g} does not fit a limit of {limit} tokens.")
    share = clipped if clipped > 0 else 1.0 / max(requests, 2)
    edge = limit if clipped > 0 else min(longest, limit)
    z = _upper_quantile(min(max(share, 1e-7), 0.5))
    low, high = 0.0, 4.0
    for _ in range(60):  # a larger sigma with this upper quantile has a lower mean
        sigma = 0.5 * (low + high)
        if _cut_mean(math.log(edge) - z * sigma, sigma, limit) > mean:
            low = sigma
        else:
            high = sigma
    return LogNormal(math.exp(math.log(edge) - z * high), high, limit)


def _cut_mean(mu: float, sigma: float, limit: float) -> float:
    """Mean of min(log-normal, limit)."""
    if sigma <= 0:
        return min(math.exp(mu), limit)
    z = (math.log(limit) - mu) / sigma
    below = math.exp(mu + 0.5 * sigma**2) * _cdf(z - sigma)
    return below + limit * (1.0 - _cdf(z))


def _cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def _upper_quantile(share: float) -> float:
    """z with so much of a normal distribution above it."""
    low, high = -1.0, 8.0
    for _ in range(60):
        z = 0.5 * (low + high)
        low, high = (z, high) if 1.0 - _cdf(z) > share else (low, z)
    return high
