"""Intervals of measurements in one job."""

import math
import random

import pytest

from benchmarks.intervals import pooled, ratio

TRUE = 1.5


def noisy(rng, count, noise):
    """Seconds of so many rollouts of stock and of an arm, on a machine whose pace changes."""
    paces = [20 * rng.uniform(1 - noise, 1 + noise) for _ in range(count)]
    return [(pace, pace / TRUE * rng.uniform(0.8, 1.2)) for pace in paces]


def over(sums):
    return sums[:, 0] / sums[:, 1]


@pytest.mark.parametrize("count", [5, 9, 24])
def test_nineteen_of_twenty_intervals_hold_the_truth(count):
    found = [pooled(noisy(random.Random(seed), count, 0.6), over) for seed in range(100)]
    assert 89 <= sum(low < TRUE < high for _, low, high in found) <= 99
    assert all(low <= of_all <= high for of_all, low, high in found)


def test_more_measurements_narrow_it_and_one_is_all_there_is():
    found = [pooled(noisy(random.Random(1), n, 0.6), over) for n in (6, 24, 96)]
    widths = [math.log(high / low) for _, low, high in found]
    assert widths[0] > 1.5 * widths[1] > 2 * widths[2]
    assert pooled([(3.0, 2.0)], over) == [1.5, 1.5, 1.5]


def test_a_ratio_divides_each_side_by_what_it_wrote():
    both = [((4.0, 2.0), (3.0, 3.0))] * 2
    assert ratio(both, lambda side: side[0], lambda side: side[1]) == [2.0, 2.0, 2.0]
