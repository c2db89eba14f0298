"""The simulation of control rollouts: what a run without any saves, and what the account makes of it."""

import pytest

from benchmarks.simulate.controls import simulate


def test_a_trained_drafter_saves_from_the_first_rollout_and_a_random_one_does_not():
    found = simulate(1)
    warm, fresh = found["warm, never"], found["fresh, never"]
    assert warm["truth_s"] > 1.0 and warm["claimed_s"] == pytest.approx(warm["truth_s"], rel=0.3)
    assert fresh["truth_s"] == fresh["claimed_s"] == 0.0
    assert all(row["control_rollouts"] == 0 for row in found.values()), "not in the first rollout"
