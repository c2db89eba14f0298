"""A trainer that waits for samples on devices of its own: who trains there, when, and what the wait was worth."""

import pytest

from verl_tlt.idle.replica_idle import Command, TrainerIdlePlanner

BUSY = {"standalone": 9}


@pytest.fixture
def planner():
    return TrainerIdlePlanner(["a", "b"], begin=10.0, settle_s=0.1, spot_workers=["a", "b"])


def test_training_starts_once_the_wait_has_settled_and_only_once(planner):
    assert planner.observe(10.05, BUSY, pending=3) == []
    assert planner.observe(10.2, BUSY, pending=3) == [Command("train", "a"), Command("train", "b")]
    assert planner.observe(10.3, BUSY, pending=0) == []


def test_samples_that_are_there_already_start_nothing(planner):
    assert planner.end(10.05) == []
    assert planner.observe(11.0, BUSY, pending=0) == []


def test_all_stop_when_the_samples_are_there(planner):
    planner.observe(10.2, BUSY, pending=0)
    planner.training("a", 10.2)
    planner.training("b", 10.3)
    planner.stopped("b", 11.0)
    assert planner.end(12.0) == [Command("stop", "a")]
    planner.stopped("a", 12.25)
    account = planner.account(13.0)
    assert account.bubble_s == pytest.approx({"a": 2.0, "b": 2.0})
    assert account.used_s == pytest.approx({"a": 1.8, "b": 0.7})
    assert account.stop_s == pytest.approx({"a": 0.25})


def test_one_whose_buffer_is_not_worth_it_does_not_train():
    planner = TrainerIdlePlanner(["a", "b"], begin=8.0, settle_s=0.25, spot_workers=["b"])
    assert planner.observe(8.25, BUSY, pending=0) == [Command("train", "b")]


def test_a_failed_session_is_not_tried_again_in_this_wait(planner):
    planner.observe(10.2, BUSY, pending=0)
    planner.training("a", 10.2)
    planner.failed("a", 10.4)
    assert planner.observe(11.0, BUSY, pending=0) == []
    assert planner.account(11.0).failures == 1
    assert planner.account(11.0).used_s["a"] == pytest.approx(0.2)
