"""OFF, K and what bounds them: whether the drafter runs in the next rollout, and how long its drafts are in a step."""

import pytest

from verl_tlt.messages.rollout import EngineStats, Work
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.latency_table import CONTEXT_TOKENS, for_policy
from verl_tlt.speculation.draft_length import Limits, Profitability, StepCosts, draft_length, is_profitable
from verl_tlt.speculation.policies.base import FixedPolicy
from verl_tlt.speculation.policies.factory import make_policy
from verl_tlt.speculation.types import OFF, Load

GRAPHS = Limits((0, 1, 3), token_limit=512)


@pytest.mark.parametrize(
    ("wanted", "batch", "chosen"),
    [(3, 128, 3), (3, 129, 1), (3, 257, 0), (1, 300, 0), (0, 600, 0), (9, 8, 3), (-1, 8, 0)],
)
def test_no_draft_is_longer_than_the_engine_can_have(wanted, batch, chosen):
    policy = FixedPolicy(wanted)
    assert draft_length(policy, Load(batch, 0), GRAPHS) == chosen
    assert draft_length(policy, Load(batch, 0), Limits((0, 1, 3))) == max(0, min(wanted, 3)), "without graphs"
    assert draft_length(FixedPolicy(0), Load(batch, 0), GRAPHS, forced=max(wanted, 0)) == chosen


def test_one_request_that_could_outgrow_the_drafter_stops_it_for_all():
    limits = Limits((0, 1, 3), context_limit=61)
    for longest, chosen in ((61, 3), (62, 0)):
        assert draft_length(FixedPolicy(3), Load(4, 100), limits, longest=longest) == chosen
        assert draft_length(FixedPolicy(0), Load(4, 100), limits, longest=longest, forced=3) == chosen
    assert limits.outgrown(62) and not limits.outgrown(61)


def test_while_the_drafter_does_not_run_nobody_is_asked():
    policy = FixedPolicy(3)
    policy.choose = lambda load: 1 / 0
    assert draft_length(policy, Load(4, 100), GRAPHS, drafting=False, forced=2, longest=10**9) == OFF
    assert draft_length(policy, Load(4, 100), GRAPHS, forced=2) == 2


MEASURED = for_policy({
    OFF: [(1, 0.010), (8, 0.012), (32, 0.020)],
    0: [(1, 0.011), (8, 0.013), (32, 0.022)],
    1: [(1, 0.014), (8, 0.018), (32, 0.035)],
    3: [(1, 0.018), (8, 0.026), (32, 0.060)],
})  # fmt: skip
COSTS = StepCosts(MEASURED)


def test_costs_are_those_of_the_model_that_the_same_table_seeds_in_the_engine():
    """OFF is decided in the server and K in the engine: one table, one model, the same seconds."""
    policy = make_policy("goodput", (0, 1, 3))
    policy.set_latency(MEASURED)
    for batch in (1, 3, 8, 20, 32, 200):
        assert [COSTS.at(batch)[0], *COSTS.at(batch)[1]] == policy.latency.predict(batch, batch * CONTEXT_TOKENS)
    assert COSTS.at(8) == (pytest.approx(0.012), pytest.approx([0.013, 0.018, 0.026]))
    assert isinstance(policy.latency, LatencyModel)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("acceptance", [[0.8, 0.7, 0.7], [0.6, 0.5, 0.4], [0.4, 0.3, 0.3]])
def test_off_and_k_agree_on_what_a_draft_is_worth(batch, acceptance):
    """Where the best K beats K=0 in the engine, a rollout at that batch is dearer without its drafter than by K=0."""
    policy = make_policy("table", (0, 1, 3))
    policy.set_latency(MEASURED)
    policy.set_acceptance(acceptance)
    drafts = policy.choose(Load(batch, batch * CONTEXT_TOKENS)) > 0
    zero = COSTS.at(batch)[1][0] / COSTS.at(batch)[0]  # time of K=0 against OFF
    assert is_profitable(acceptance, COSTS, "table", {batch: 100}, worth=zero) == drafts


def test_a_good_drafter_is_worth_running_and_a_random_one_is_not():
    assert is_profitable([0.8, 0.7, 0.7], COSTS, "goodput")
    assert not is_profitable([0.02, 0.0, 0.0], COSTS, "goodput")
    assert not is_profitable([0.42, 0.2, 0.1], COSTS, "goodput")  # a little in the tail, less than K=0 costs before


def test_the_unknown_is_tried_and_orders_are_followed():
    assert is_profitable([], COSTS, "goodput")
    assert is_profitable([0.3], None, "table")
    assert not is_profitable([0.02, 0.0], None, "table")  # hopeless whatever a step costs
    assert is_profitable([0.0], COSTS, "fixed")
    assert not is_profitable([0.9], COSTS, "off")


MEDIOCRE = [0.6, 0.5, 0.4]
"""Pays at batch 1, costs at batch 32."""


def rollout(work):
    return EngineStats(work=tuple(Work(batch, 1.0, tokens) for batch, tokens in work.items()))


@pytest.mark.parametrize(("work", "worth"), [({1: 900, 32: 320}, True), ({1: 10, 32: 32000}, False)])
def test_it_counts_where_the_last_rollout_spent_its_time(work, worth):
    assert is_profitable(MEDIOCRE, COSTS, "goodput", work) == worth
    switch = Profitability("goodput")
    switch.set_costs(MEASURED)
    switch.learn(rollout(work), drafting=False, acceptance=MEDIOCRE)
    assert switch.decide(MEDIOCRE) == worth
    switch.learn(EngineStats(), drafting=False, acceptance=MEDIOCRE)  # an empty step says nothing
    assert switch.decide(MEDIOCRE) == worth


def test_a_drafter_must_promise_more_while_none_has_been_tried():
    switch = Profitability("goodput")
    switch.set_costs(MEASURED)
    some = [0.5, 0.5, 0.5]  # 0.93 of OFF's time at batch 1
    switch.learn(rollout({1: 100}), drafting=False, acceptance=some)
    assert not switch.decide(some)
    switch.learn(rollout({1: 100}), drafting=True, acceptance=some, saved=(1.0, 10.0))
    assert switch.decide(some)


def test_a_drafter_that_lost_time_rests_until_a_better_one_comes():
    switch = Profitability("goodput")
    switch.set_costs(MEASURED)
    good, better = [0.7, 0.7, 0.7], [0.8, 0.8, 0.8]
    assert switch.decide(good)
    switch.learn(rollout({1: 100}), drafting=True, acceptance=good, saved=(-0.2, 10.0))
    assert switch.decide(good), "two percent may be noise"
    switch.learn(rollout({1: 100}), drafting=True, acceptance=good, saved=(-2.0, 10.0))
    assert not switch.decide(good)
    switch.learn(rollout({1: 100}), drafting=False, acceptance=good)
    assert not switch.decide(good), "a rollout without it proves nothing"
    assert switch.decide(better)
    switch.learn(rollout({1: 100}), drafting=True, acceptance=better, saved=(3.0, 10.0))
    assert switch.decide(good)


def test_what_a_small_part_of_a_rollout_lost_rests_no_drafter():
    switch = Profitability("goodput")
    switch.set_costs(MEASURED)
    good, some = [0.7, 0.7, 0.7], [0.5, 0.5, 0.5]
    seen = EngineStats(work=(Work(1, 18.0, 900.0), Work(4, 5.0, 900.0)))
    switch.learn(seen, drafting=True, acceptance=good, saved=(-0.3, 5.3))
    assert switch.decide(good) and not switch.decide(some), "nor does it make up for a trial"
    switch.learn(seen, drafting=True, acceptance=good, saved=(-0.6, 12.0))
    assert not switch.decide(good)


def test_a_drafter_of_unknown_acceptance_that_lost_time_rests():
    switch = Profitability("goodput")
    assert switch.decide([])
    switch.learn(rollout({8: 100}), drafting=True, acceptance=[], saved=(-2.0, 10.0))
    assert not switch.decide([])


@pytest.mark.parametrize(("policy", "source"), [("fixed", "eagle"), ("goodput", "both")])
def test_what_always_drafts_never_rests(policy, source):
    switch = Profitability(policy, source)
    switch.learn(rollout({8: 100}), drafting=True, acceptance=[], saved=(-9.0, 10.0))
    assert switch.decide([0.01])


def test_policy_off_never_drafts():
    assert not Profitability("off", "both").decide([0.9])


def test_a_draft_measured_cheaper_than_no_drafter_at_all_is_taken_to_cost_as_much():
    lucky = StepCosts(for_policy({OFF: [(1, 0.020)], 0: [(1, 0.020)], 1: [(1, 0.015)]}))
    assert is_profitable([0.06], lucky, "goodput", worth=0.95), "1 / 1.06 of OFF's time"
    assert not is_profitable([0.06], lucky, "goodput", worth=0.93)


def test_costs_without_a_figure_for_off_are_none():
    switch = Profitability("goodput")
    switch.set_costs(for_policy({0: [(1, 0.011)], 3: [(1, 0.018)]}))
    assert switch.decide([0.1, 0.1, 0.1]), "tried, as without any costs"
    switch.set_costs(MEASURED)
    assert not switch.decide([0.1, 0.1, 0.1])
