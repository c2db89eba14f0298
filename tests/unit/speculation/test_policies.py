"""The policies: which K they choose at which batch, and what they learn while the run goes on."""

import math

import numpy as np
import pytest
from step_costs import step_costs

from verl_tlt.speculation import policies
from verl_tlt.speculation.costs import REBUILD_STEPS, LatencyPoint, LatencyTable
from verl_tlt.speculation.limits import Limits
from verl_tlt.speculation.policies import POLICIES, PROBE_AFTER, PROBES, FixedPolicy, LiveTablePolicy, make_policy
from verl_tlt.speculation.types import OFF, ControlError, Step

LENGTHS = (0, 1, 3, 7)
GOOD, POOR, NONE = [0.8] * 7, [0.3] * 7, [0.0] * 7


def step_s(batch, k, context=32):
    """Drafting is cheap at batch 1 and dear at batch 64."""
    return 0.010 + 2e-4 * batch * (k + 1) + 0.001 * k + 1e-7 * batch * context


def calibration(lengths=LENGTHS, cost=step_s):
    loads = [(batch, context) for batch in (1, 4, 16, 64) for context in (32, 1000)]
    return LatencyTable(tuple(LatencyPoint(b, b * c, k, cost(b, k, c)) for b, c in loads for k in lengths))


def live_table(acceptance=(), lengths=LENGTHS, cost=step_s):
    policy = LiveTablePolicy(LENGTHS, 64)
    policy.set_costs(calibration(lengths, cost))
    policy.set_acceptance(acceptance)
    return policy


def run(policy, steps, batch, acceptance, cost=step_s, context=32):
    """Decode with the policy, drafts accepted as expected; the K of each step."""
    chosen, verified, rng = [], 0, np.random.default_rng(0)
    for _ in range(steps):
        k = policy.choose(batch)
        hits = np.logical_and.accumulate(rng.random((batch, verified)) < np.array(acceptance[:verified]), axis=1)
        accepted = tuple(int(n) for n in hits.sum(axis=0))
        policy.observe(
            Step(batch, batch * context, k, verified, batch if verified else 0, accepted,
                 latency_s=cost(batch, k, context), clean=k == verified)
        )  # fmt: skip
        chosen.append(k)
        verified = k
    return chosen


def test_it_drafts_what_is_fastest_by_the_calibration():
    policy = live_table(GOOD)
    tau = [1.0, 1.8, 2.44, 2.952, 3.3616, 3.68928, 3.951424, 4.1611392]
    for batch in (1, 4, 16, 64):
        assert policy.choose(batch) == max(LENGTHS, key=lambda k: tau[k] / step_s(batch, k))
    assert policy.choose(1) == 7 > policy.choose(64)
    assert policy.choose(1000) == policy.choose(64), "a batch beyond the list is its last one"


def test_at_each_batch_it_chooses_among_the_drafts_that_the_engine_can_have():
    """K=3 looks fastest, and has no graph for 20 requests; of what has one, K=0 is the fastest."""
    lengths = (0, 1, 3)
    costs = step_costs({0: [(1, 0.01), (32, 0.01)], 1: [(1, 0.02), (32, 0.02)], 3: [(1, 0.01), (16, 0.01)]})
    policy = LiveTablePolicy(lengths, 32, Limits(lengths, token_limit=64))
    policy.set_costs(costs)
    policy.set_acceptance([0.8, 0.8, 0.8])
    assert (policy.choose(16), policy.choose(20)) == (3, 0)


def test_before_costs_are_known_it_drafts_nothing():
    policy = LiveTablePolicy(LENGTHS, 64)
    policy.set_acceptance(GOOD)
    assert set(run(policy, 3 * REBUILD_STEPS, 2, GOOD)) == {0}


@pytest.mark.parametrize(("before", "after", "lengths"), [(NONE, GOOD, {3, 7}), (GOOD, NONE, {0})])
def test_it_follows_acceptance(before, after, lengths):
    chosen = run(live_table(before), 3000, 2, after)
    assert set(chosen[-REBUILD_STEPS:]) <= lengths


def test_after_long_at_k_0_it_tries_and_goes_back_where_nothing_is_accepted():
    chosen = run(live_table(NONE), 3 * PROBE_AFTER, 2, NONE)
    tried = [i for i, k in enumerate(chosen) if k]
    assert {chosen[i] for i in tried} == {1} and PROBES <= len(tried) <= 3 * PROBES and tried[0] >= PROBE_AFTER - 1


def test_a_k_that_is_used_all_the_time_is_still_compared_with_no_drafts(monkeypatch):
    """Of one K alone nothing tells whether it or the machine became slower."""

    def true(batch, k, context):
        return step_s(batch, k, context) * {0: 1.0, 1: 1.67}.get(k, 3.0)

    acceptance = [0.7, 0.6, *[0.5] * 5]
    chosen = run(live_table(acceptance), 40 * PROBE_AFTER, 16, acceptance, true)
    assert chosen[0] == 1 and chosen[-1] == 0
    switches = next(i for i in range(len(chosen)) if set(chosen[i : i + PROBE_AFTER]) == {0})
    assert switches < 8 * PROBE_AFTER and chosen[:switches].count(0) <= PROBES * (1 + switches // PROBE_AFTER)
    monkeypatch.setattr(policies, "PROBE_AFTER", math.inf)
    assert run(live_table(acceptance), 40 * PROBE_AFTER, 16, acceptance, true)[-1] == 1, "else it tests nothing"


def test_lengths_that_were_not_measured_are_not_used():
    policy = live_table(GOOD, lengths=(OFF, 0, 3))
    assert set(policy.table) <= {0, 3} and set(run(policy, PROBE_AFTER, 2, GOOD)) == {3}
    nothing = live_table(GOOD, lengths=(OFF, 0))
    assert set(run(nothing, 2 * PROBE_AFTER, 2, GOOD)) == {0}
    assert set(live_table(GOOD, lengths=(OFF,)).table) == {0}


def test_a_draft_length_that_takes_longer_than_calibrated_is_given_up():
    def true(batch, k, context):
        return step_s(batch, k, context) * (2.0 if k == 7 else 1.0)

    policy = live_table(GOOD)
    assert policy.choose(1) == 7
    assert run(policy, 600, 1, GOOD, true)[-1] == 3


def test_a_long_context_is_a_reason_to_draft_more():
    """Reading it takes as long whatever K is, so a draft token costs relatively less."""
    short, long = (run(live_table(POOR), 100, 16, POOR, context=c)[-1] for c in (32, 30_000))
    assert short == 0 < long


def test_a_length_hardly_better_is_no_reason_to_change():
    policy = LiveTablePolicy((0, 3), 8)
    for hardly, chosen in ((0.995, 0), (0.98, 3)):  # of what makes K=3 as fast as K=0
        policy.set_costs(step_costs({0: [(1, 0.01)], 3: [(1, 0.01 * 2.952 * hardly)]}))
        policy.set_acceptance(GOOD)
        assert policy.choose(1) == chosen


def test_policies_by_name():
    assert [type(make_policy(name, LENGTHS, 8)) for name in POLICIES] == [LiveTablePolicy, FixedPolicy]
    assert make_policy("fixed", LENGTHS, 8).choose(1) == 7 and make_policy("fixed", LENGTHS, 8, fixed=3).choose(4) == 3
    with pytest.raises(ControlError, match="fixed=2 is none of the draft lengths"):
        make_policy("fixed", LENGTHS, 8, fixed=2)


def test_a_policy_of_ones_own_is_named_by_module_and_class():
    policy = make_policy("examples.custom_policy:LongTail", LENGTHS, 64)
    assert [policy.choose(batch) for batch in (16, 17)] == [7, 0]
    assert set(run(policy, 200, 4, NONE)[-100:]) == {0}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tables", "known: live_table, fixed, or module:Class"),
        ("examples.custom_policy:Missing", "Missing"),
        ("operator:itemgetter", "is no verl_tlt.speculation.types.Policy"),
    ],
)
def test_a_policy_that_does_not_exist_is_refused(name, sentence):
    with pytest.raises(ControlError, match=f"tlt.speculation.policy={name} .*{sentence}"):
        make_policy(name, LENGTHS, 8)
