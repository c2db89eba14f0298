"""Requests that come late: whoever has left is called back first, and nobody leaves while they are on their way."""

import pytest

from verl_tlt.idle.replica_idle import Command, ReplicaIdlePlanner, State


@pytest.fixture
def planner():
    """`a` has left and trains since 1.3, idle since 1.0; `b` and `c` serve."""
    p = ReplicaIdlePlanner("abc", expected_requests=12, settle_s=0.1)
    p.observe(0.0, {"a": 4, "b": 4, "c": 4}, pending=0)
    p.observe(1.0, {"a": 0, "b": 3, "c": 2}, pending=0)
    assert p.observe(1.2, {"a": 0, "b": 3, "c": 2}, pending=0) == [Command("leave", "a")]
    assert p.left("a") == [Command("try_sleep", "a")]
    assert p.slept("a") == [Command("train", "a")]
    p.training("a", 1.3)
    return p


@pytest.fixture
def recalled(planner):
    """`a` serves again since 2.1."""
    assert planner.recall() == [Command("stop", "a"), Command("wake_up", "a")]
    planner.stopped("a", 2.0)
    assert planner.awake("a", 2.1) == [Command("rejoin", "a")]
    return planner


@pytest.mark.parametrize("ending", ["stopped", "failed"])
def test_one_whose_session_is_over_only_wakes_up(planner, ending):
    getattr(planner, ending)("a", 1.8)
    assert planner.recall() == [Command("wake_up", "a")]
    assert planner.awake("a", 2.0) == [Command("rejoin", "a")]


def test_nobody_leaves_before_the_late_requests_can_have_arrived(planner):
    planner.observe(1.9, {"b": 3, "c": 0}, pending=0)
    planner.recall()
    planner.stopped("a", 2.0)
    planner.awake("a", 2.0)
    # Before the recall `c` had been empty long enough.
    assert planner.observe(2.01, {"a": 0, "b": 3, "c": 0}, pending=0) == []
    assert planner.observe(2.05, {"a": 0, "b": 3, "c": 0}, pending=1) == []
    assert planner.observe(2.5, {"a": 1, "b": 4, "c": 1}, pending=0) == []


def test_a_replica_has_one_session_in_a_phase(recalled):
    assert recalled.state("a") is State.BUSY
    for now in (3.0, 4.0):
        assert recalled.observe(now, {"a": 0, "b": 3, "c": 1}, pending=0) == []


def test_one_that_cannot_wake_up_stays_away_until_the_sync(planner):
    planner.recall()
    planner.stopped("a", 2.0)
    planner.failed("a", 2.1)
    assert planner.state("a") is State.IDLE and planner.recall() == [], "it is not waited for again"
    assert planner.account(3.0).failures == 1


def test_the_bubble_before_a_recall_counts(recalled):
    recalled.observe(2.2, {"a": 2, "b": 1, "c": 1}, pending=0)
    recalled.observe(4.0, {"a": 0, "b": 1, "c": 1}, pending=0)
    recalled.observe(5.0, {"a": 0, "b": 0, "c": 0}, pending=0)
    recalled.end(5.0)
    account = recalled.account(5.0)
    assert account.bubble_s["a"] == pytest.approx((2.1 - 1.0) + (5.0 - 4.0))
    assert account.used_s["a"] == pytest.approx(2.0 - 1.3)


def test_after_the_end_nobody_is_called_back(planner):
    planner.end(2.0)
    assert planner.recall() == []
