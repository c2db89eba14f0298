"""Runs in which everything changes: how their seconds are pooled."""

import pytest

from benchmarks.control.changing import STAGES, faster

NAMED = [stage.name for stage in STAGES]


def turn(**seconds: float):
    """A repetition in which each arm takes this long in its first rollout, and a second in each other."""
    return {name: {NAMED[0]: taken, **dict.fromkeys(NAMED[1:], 1.0)} for name, taken in seconds.items()}


def test_all_seconds_of_an_arm_are_compared_with_all_of_goodputs():
    turns = [turn(table=6.0, goodput=2.0), turn(table=30.0, goodput=16.0)]
    assert faster(turns, "table", [NAMED[0]])[0] == 2.0  # not the mean of 3 and 1.875
    assert faster(turns, "table", NAMED)[0] == pytest.approx((36 + 8) / (18 + 8), abs=1e-4)
    assert faster(turns, "table", NAMED[1:]) == [1.0, 1.0, 1.0]
    _, low, high = faster(turns * 10, "table", [NAMED[0]])  # whole repetitions are drawn
    assert 1.875 < low < 2.0 < high < 3.0
