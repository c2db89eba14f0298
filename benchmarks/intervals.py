"""Ratios of seconds with intervals of single measurements, for arms that take turns within one job."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from verl_tlt.bootstrap import Floats, interval

COVERED = 0.95
T = TypeVar("T")


def pooled(rows: Sequence[Sequence[float]], figure: Callable[[Floats], Floats], seed: int = 0) -> list[float]:
    """[of all, low, high]: `figure` of the sums of all rows, and its 95 % interval, wider for few rows."""
    table = np.asarray(rows, dtype=np.float64)  # [n, columns]
    of_all = float(figure(table.sum(axis=0, keepdims=True))[0])
    return [of_all, *interval(table, figure, (1 - COVERED) / 2, seed, count=len(table))]


def ratio(both: Sequence[tuple[T, T]], seconds: Callable[[T], float], per: Callable[[T], float]) -> list[float]:
    """[ratio, low, high] (95 %): the first side's seconds over the second's, each for what `per` counts."""

    def speedup(sums: Floats) -> Any:
        return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])

    rows = [(seconds(theirs), per(theirs), seconds(ours), per(ours)) for theirs, ours in both]
    return [round(value, 4) for value in pooled(rows, speedup)]
