"""A figure of pooled measurements, with the interval that drawing them anew gives it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

DRAWS = 2000
COVERED = 0.95

T = TypeVar("T")


def interval(
    measured: Sequence[T], figure: Callable[[Sequence[T]], float], seed: int = 0
) -> tuple[float, float, float]:
    """`figure` of all that was measured, and between what 95 % of the draws (with replacement) find it.

    Returns:
        (of all, low, high).
    """
    rng = random.Random(seed)
    drawn = sorted(figure(rng.choices(measured, k=len(measured))) for _ in range(DRAWS))
    tail = round((1 - COVERED) / 2 * (DRAWS - 1))
    return figure(measured), drawn[tail], drawn[-1 - tail]
