"""Intervals hold the truth as often as they say, of many measurements and of few."""

import math
import random

import pytest

from verl_tlt.commands.compare.result import FEWEST, interval

TRUE = 1.5


def over(pairs):
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs)


def race(seed, count):
    """Seconds of two arms, the second 1.5 times as fast, on a machine whose pace changes."""
    rng = random.Random(seed)
    paces = [20 * rng.uniform(0.5, 2) for _ in range(count)]
    return [(pace, pace / TRUE * rng.uniform(0.8, 1.2)) for pace in paces]


@pytest.mark.parametrize("count", [FEWEST, 9, 24])
def test_nineteen_of_twenty_intervals_hold_the_truth(count):
    found = [interval(race(seed, count), over) for seed in range(100)]
    assert 89 <= sum(low < TRUE < high for _, low, high in found) <= 99
    assert all(low <= pooled <= high for pooled, low, high in found)


def test_more_measurements_narrow_it():
    widths = [math.log(high / low) for _, low, high in (interval(race(1, n), over) for n in (6, 24, 96))]
    assert widths[0] > 1.5 * widths[1] > 2 * widths[2]


def test_one_measurement_is_all_there_is():
    assert interval([(3.0, 2.0)], over) == (1.5, 1.5, 1.5)
