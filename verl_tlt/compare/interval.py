"""A figure of pooled measurements, with the interval that drawing them anew gives it. Standard library only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TypeVar

DRAWS = 2000
COVERED = 0.95
FEWEST = 5
"""Measurements below which an interval holds the truth too seldom to be told by."""
T = TypeVar("T")


def interval(
    measured: Sequence[T], figure: Callable[[Sequence[T]], float], seed: int = 0
) -> tuple[float, float, float]:
    """`figure` of all that was measured, and between what 95 % of such measurements would find it.

    The bootstrap: what was measured is drawn anew, with replacement. Few measurements vary less among themselves than
    they would if taken again, so the limits lie further out than 95 % of the draws: by Student's t and the missing
    degree of freedom (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 4.1). Six then hold
    the truth in 91 of 100 cases, not in 84.

    Returns:
        (of all, low, high).
    """
    rng = random.Random(seed)
    drawn = sorted(figure(rng.choices(measured, k=len(measured))) for _ in range(DRAWS))
    tail = round(_tail(len(measured)) * (DRAWS - 1))
    return figure(measured), drawn[tail], drawn[-1 - tail]


def _tail(count: int) -> float:
    """Share of the draws below (and above) the interval of so many measurements."""
    if count < 2:
        return 0.0
    normal, free = NormalDist(), count - 1
    z = normal.inv_cdf((1 + COVERED) / 2)
    # Student's t by its expansion in 1 / free (Abramowitz and Stegun, 26.7.5).
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return normal.cdf(-t * math.sqrt(count / free))
