"""How often the fleet is looked at."""

import itertools

import pytest

from verl_tlt.idle.planner import PATIENCE, next_pause


def test_looks_become_rarer_while_nothing_changes_and_frequent_again_after_a_change():
    quiet = list(itertools.accumulate(range(12), lambda pause, _: next_pause(pause, 0.05, False), initial=0.05))
    assert all(b >= a for a, b in itertools.pairwise(quiet))
    assert quiet[-1] == pytest.approx(PATIENCE * 0.05)
    assert next_pause(quiet[-1], 0.05, True) == 0.05
