"""Bootstrap intervals: what was measured is drawn anew, with replacement, and a figure of it computed each time."""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
DRAWS = 2000
"""Resamples: the level of an interval is then off by half a percentage point at most."""


def interval(
    rows: Floats, figure: Callable[[Floats], Floats], error: float, seed: int, count: float
) -> tuple[float, float]:
    """The interval in which a figure lies; the truth is beyond either end with a chance of `error`.

    `rows` of measurements [n, columns] are drawn anew; `figure` is of sums of rows, [resamples, columns] ->
    [resamples]. `count`: how many independent measurements the rows are worth, see `tail`.
    """
    n = len(rows)
    drawn = np.random.default_rng(seed).integers(n, size=(DRAWS, n))  # numbers of rows
    cells = drawn + n * np.arange(DRAWS)[:, None]  # one histogram for all resamples: far faster than multinomial
    times = np.bincount(cells.ravel(), minlength=DRAWS * n)  # how often a row is in a resample
    figures = figure(times.reshape(DRAWS, n).astype(np.float64) @ rows)
    beyond = tail(count, error)
    low, high = np.quantile(figures, [beyond, 1.0 - beyond])
    return float(low), float(high)


def tail(count: float, error: float) -> float:
    """Share of the resamples to leave out on one side, so that the truth lies there with a chance of `error`.

    A plain percentile is too narrow for few measurements, since they vary less among themselves than they would if
    taken again. This is the expanded percentile interval (Hesterberg, "What Teachers Should Know About the Bootstrap",
    2015, section 4.1): by Student's t and the missing degree of freedom.

    `count` is of independent measurements; with unequal weights w they are as many as (sum w)^2 / sum w^2.
    """
    freedom = max(1.0, count - 1.0)
    return NormalDist().cdf(-math.sqrt((freedom + 1.0) / freedom) * student(1.0 - error, freedom))


def student(p: float, freedom: float) -> float:
    """Quantile of Student's t, by its expansion in 1/freedom (Abramowitz and Stegun 26.7.5): within 2 % from 3 on."""
    if freedom == 2.0:  # three rounds of a comparison; the expansion is 3 % too small
        return (2.0 * p - 1.0) * math.sqrt(2.0 / (4.0 * p * (1.0 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**k for k, term in enumerate(terms, start=1))
