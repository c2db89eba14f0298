"""How far out the limits of a bootstrap interval lie when little was measured. Standard library only."""

from __future__ import annotations

import math
from statistics import NormalDist


def tail(count: float, error: float) -> float:
    """Share of the resamples to leave out on one side, so that the truth lies there with a chance of `error`.

    A plain percentile is too narrow for few measurements, since they vary less among themselves than they would if
    taken again. This is the expanded percentile interval (Hesterberg, "What Teachers Should Know About the Bootstrap",
    2015, section 4.1): by Student's t and the missing degree of freedom.

    Args:
        count: independent measurements; with unequal weights w as many as (sum w)^2 / sum w^2.
        error: chance on that side.
    """
    freedom = max(1.0, count - 1.0)
    return NormalDist().cdf(-math.sqrt((freedom + 1.0) / freedom) * _student(1.0 - error, freedom))


def _student(p: float, freedom: float) -> float:
    """Quantile of Student's t by its expansion in 1/freedom (Abramowitz and Stegun 26.7.5); within 2 % from 3 on."""
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**k for k, term in enumerate(terms, start=1))
