"""How often the fleet is looked at."""

import itertools

import pytest

from verl_tlt.idle.replica_idle import PATIENCE, PhaseAccount, next_pause


def test_looks_become_rarer_while_nothing_changes_and_frequent_again_after_a_change():
    quiet = list(itertools.accumulate(range(12), lambda pause, _: next_pause(pause, 0.05, False), initial=0.05))
    assert all(b >= a for a, b in itertools.pairwise(quiet))
    assert quiet[-1] == pytest.approx(PATIENCE * 0.05)
    assert next_pause(quiet[-1], 0.05, True) == 0.05


def test_the_phases_of_a_step_add_up():
    first = PhaseAccount({"a": 1.0}, {"a": 0.5}, {"a": 0.25}, 1, 10.0, lost=1)
    second = PhaseAccount({"a": 2.0, "b": 4.0}, {}, {"b": 0.5}, 4, 20.0, lost=2)
    assert first.then(second) == PhaseAccount({"a": 3.0, "b": 4.0}, {"a": 0.5}, {"a": 0.25, "b": 0.5}, 5, 20.0, lost=3)
