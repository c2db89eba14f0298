"""What the drain concludes from the speeds of its arms."""

import pytest

from benchmarks.control.drain import faster


def test_an_arm_is_as_much_faster_as_all_its_repetitions_took_less():
    assert faster([200.0, 20.0], [100.0, 10.0]) == [2.0, 2.0, 2.0]
    pooled, low, high = faster([100.0, 100.0], [100.0, 25.0])
    assert pooled == pytest.approx((1 / 100 + 1 / 25) / (1 / 100 + 1 / 100)), "of seconds, not of speeds"
    assert (low, high) == (1.0, 4.0)
