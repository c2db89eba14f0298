"""Whether the drafter runs in the next rollout."""

import pytest

from verl_tlt.messages.rollout import EngineStats, Work
from verl_tlt.speculation.profitability import Profitability, accept_lengths, is_profitable
from verl_tlt.speculation.types import OFF


def test_accept_lengths_chain_conditional_acceptance():
    assert accept_lengths([0.8, 0.5], 3) == pytest.approx([1.0, 1.8, 2.2, 2.4])


COSTS = {
    OFF: [(1, 0.010), (8, 0.012), (32, 0.020)],
    0: [(1, 0.011), (8, 0.013), (32, 0.022)],
    1: [(1, 0.014), (8, 0.018), (32, 0.035)],
    3: [(1, 0.018), (8, 0.026), (32, 0.060)],
}


def test_a_good_drafter_is_worth_running_and_a_random_one_is_not():
    assert is_profitable([0.8, 0.7, 0.7], COSTS, "goodput")
    assert not is_profitable([0.02, 0.0, 0.0], COSTS, "goodput")
    assert not is_profitable([0.42, 0.2, 0.1], COSTS, "goodput")  # a little in the tail, less than K=0 costs before


def test_the_unknown_is_tried_and_orders_are_followed():
    assert is_profitable([], COSTS, "goodput")
    assert is_profitable([0.3], {}, "table")
    assert not is_profitable([0.02, 0.0], {}, "table")  # hopeless whatever a step costs
    assert is_profitable([0.0], COSTS, "fixed")
    assert not is_profitable([0.9], COSTS, "off")


MEDIOCRE = [0.6, 0.5, 0.4]
"""Pays at batch 1, costs at batch 32."""


def rollout(work, compared_s=10.0, saved_s=0.0):
    done = tuple(Work(batch, 1.0, tokens) for batch, tokens in work.items())
    return EngineStats(work=done, compared_s=compared_s, saved_s=saved_s)


@pytest.mark.parametrize(("work", "worth"), [({1: 900, 32: 320}, True), ({1: 10, 32: 32000}, False)])
def test_it_counts_where_the_last_rollout_spent_its_time(work, worth):
    assert is_profitable(MEDIOCRE, COSTS, "goodput", work) == worth
    switch = Profitability("goodput")
    switch.latency = COSTS
    switch.learn(rollout(work), drafting=False, acceptance=MEDIOCRE)
    assert switch.decide(MEDIOCRE) == worth
    switch.learn(EngineStats(), drafting=False, acceptance=MEDIOCRE)  # an empty step says nothing
    assert switch.decide(MEDIOCRE) == worth


def test_a_drafter_must_promise_more_while_none_has_been_tried():
    switch = Profitability("goodput")
    switch.latency, some = COSTS, [0.5, 0.5, 0.5]  # 0.93 of OFF's time at batch 1
    switch.learn(rollout({1: 100}), drafting=False, acceptance=some)
    assert not switch.decide(some)
    switch.learn(rollout({1: 100}, saved_s=1.0), drafting=True, acceptance=some)
    assert switch.decide(some)


def test_a_drafter_that_lost_time_rests_until_a_better_one_comes():
    switch = Profitability("goodput")
    switch.latency = COSTS
    good, better = [0.7, 0.7, 0.7], [0.8, 0.8, 0.8]
    assert switch.decide(good)
    switch.learn(rollout({1: 100}, saved_s=-0.2), drafting=True, acceptance=good)
    assert switch.decide(good), "two percent may be noise"
    switch.learn(rollout({1: 100}, saved_s=-2.0), drafting=True, acceptance=good)
    assert not switch.decide(good)
    switch.learn(rollout({1: 100}), drafting=False, acceptance=good)
    assert not switch.decide(good), "a rollout without it proves nothing"
    assert switch.decide(better)
    switch.learn(rollout({1: 100}, saved_s=3.0), drafting=True, acceptance=better)
    assert switch.decide(good)


def test_a_drafter_of_unknown_acceptance_that_lost_time_rests():
    switch = Profitability("goodput")
    assert switch.decide([])
    switch.learn(rollout({8: 100}, saved_s=-2.0), drafting=True, acceptance=[])
    assert not switch.decide([])


@pytest.mark.parametrize(("policy", "source"), [("fixed", "eagle"), ("goodput", "both")])
def test_what_always_drafts_never_rests(policy, source):
    switch = Profitability(policy, source)
    switch.learn(rollout({8: 100}, saved_s=-9.0), drafting=True, acceptance=[])
    assert switch.decide([0.01])


def test_policy_off_never_drafts():
    assert not Profitability("off", "both").decide([0.9])
