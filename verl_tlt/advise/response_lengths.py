"""Lengths of the responses that a simulated rollout generates: log-normal, cut at the longest response allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from verl_tlt.errors import TLTError

Lengths = npt.NDArray[np.int64]
STANDARD_NORMAL = NormalDist()


@dataclass(frozen=True)
class LogNormal:
    """Log-normal response lengths in tokens, cut at `longest`."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    longest: int

    def draw(self, rng: np.random.Generator, requests: int) -> Lengths:
        """Lengths in tokens, [requests]."""
        drawn = rng.lognormal(math.log(self.median), self.sigma, requests)
        return np.clip(drawn, 1, self.longest).astype(np.int64)

    def mean(self) -> float:
        """Mean length in tokens, cut responses included."""
        mu = math.log(self.median)
        if self.sigma <= 0:
            return min(self.median, self.longest)
        z = (math.log(self.longest) - mu) / self.sigma
        below = math.exp(mu + 0.5 * self.sigma**2) * STANDARD_NORMAL.cdf(z - self.sigma)
        return below + self.longest * (1.0 - STANDARD_NORMAL.cdf(z))


def from_mean(mean: float, sigma: float, limit: int) -> LogNormal:
    """The distribution of this spread, cut at `limit`, that has this mean."""
    median = _bisect(lambda median: LogNormal(median, sigma, limit).mean() < mean, 1e-3, 4.0 * limit)
    return LogNormal(median, sigma, limit)


def from_moments(mean: float, longest: float, clipped: float, requests: int, limit: int) -> LogNormal:
    """The distribution with the mean and the longest response of steps of so many `requests`, as a run logged them.

    Where a share of all responses is `clipped` at the `limit`, that share decides in place of the longest one.

    Raises:
        TLTError: the mean is not between 1 and the limit.
    """
    if not 1 <= mean <= limit:
        raise TLTError(f"A mean response length of {mean:g} does not fit a limit of {limit} tokens.")
    share, edge = (clipped, limit) if clipped > 0 else (1.0 / max(requests, 2), min(longest, limit))
    z = STANDARD_NORMAL.inv_cdf(1.0 - min(max(share, 1e-7), 0.5))

    def with_spread(sigma: float) -> LogNormal:
        """`share` of all responses are longer than `edge`."""
        return LogNormal(edge * math.exp(-z * sigma), sigma, limit)

    # a larger sigma with the same upper quantile has a lower mean
    return with_spread(_bisect(lambda sigma: with_spread(sigma).mean() > mean, 0.0, 4.0))


def _bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    """Where `below`, which is true up to some value, turns false."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
