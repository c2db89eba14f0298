"""OFF for a rollout, speculation disabled for the run and enabled again after a probe."""

import re

import pytest

from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.tables import CONTEXT_TOKENS, LatencyTable
from verl_tlt.speculation.decision import FIRST_WAIT, IN_A_ROW, LONGEST_WAIT, RolloutDecision, RunDecision
from verl_tlt.speculation.decision import expected_saving as saving
from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.types import OFF, Load

MEASURED = LatencyTable.calibrated({
    OFF: [(1, 0.010), (8, 0.012), (32, 0.020)],
    0: [(1, 0.011), (8, 0.013), (32, 0.022)],
    1: [(1, 0.014), (8, 0.018), (32, 0.035)],
    3: [(1, 0.018), (8, 0.026), (32, 0.060)],
})  # fmt: skip
COSTS = LatencyModel((0, 1, 3), table=MEASURED)
REPLICAS = ["a", "b"]
ACCEPTANCE = (0.9, 0.9)
MEDIOCRE = [0.6, 0.5, 0.4]
"""Pays at batch 1, costs at batch 32."""
SOME = [0.5, 0.5, 0.5]
"""7 % of OFF's time is expected to be saved at batch 1."""


def decision(policy="goodput", source="eagle"):
    made = RolloutDecision(policy, source)
    made.calibrated(MEASURED)
    return made


def rollout(work):
    """Statistics of an engine that decoded so many tokens at each batch."""
    return [EngineStats(tokens_by_batch=work)]


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("acceptance", [[0.8, 0.7, 0.7], [0.6, 0.5, 0.4], [0.4, 0.3, 0.3]])
def test_off_and_k_agree_on_what_a_draft_is_worth(batch, acceptance):
    """Where the best K beats K=0 in the engine, drafting saves more at that batch than K=0 throughout."""
    policy = make_policy("table", (0, 1, 3))
    policy.set_latency(MEASURED)
    policy.set_acceptance(acceptance)
    drafts = policy.choose(Load(batch, batch * CONTEXT_TOKENS)) > 0
    off, zero, *_ = COSTS.predict(batch, batch * CONTEXT_TOKENS)
    assert (saving(acceptance, COSTS, {batch: 100}) > 1 - zero / off) == drafts


@pytest.mark.parametrize(
    ("acceptance", "drafts"),
    [([0.8, 0.7, 0.7], True), ([], True), ([0.02, 0.0, 0.0], False), ([0.42, 0.2, 0.1], False)],
)
def test_a_good_or_unknown_drafter_runs_and_a_random_one_does_not(acceptance, drafts):
    """The last one saves a little in the tail, less than its pass costs before."""
    made = decision()
    assert made.drafts(acceptance) == drafts
    assert bool(made.against) != drafts


@pytest.mark.parametrize("tried", [False, True])
@pytest.mark.parametrize("work", [{1: 100}, {1: 100, 32: 3200}, {32: 3200}])
def test_no_names_the_held_out_length_and_the_one_from_which_on_drafts_pay(work, tried):
    made = decision()
    made.learn(rollout(work), None)
    for percent in range(6, 100):
        if made.drafts([percent / 100] * 3, tried):
            break
        held_out, pays = (float(x) for x in re.findall(r"\d+\.\d+", made.against))
        assert 1.0 < held_out <= pays < 4.0
    assert 10 < percent < 99 and held_out > pays - 0.1, "the last no was close to paying"


def test_without_costs_a_drafter_is_tried_unless_it_is_useless_whatever_a_step_costs():
    untold, no_off = RolloutDecision("goodput"), RolloutDecision("goodput")
    no_off.calibrated(LatencyTable.calibrated({0: [(1, 0.011)], 3: [(1, 0.018)]}))
    for made in (untold, no_off):
        assert made.drafts([0.1, 0.1, 0.1]) and not made.drafts([0.02, 0.0])
    no_off.calibrated(MEASURED)
    assert not no_off.drafts([0.1, 0.1, 0.1])


@pytest.mark.parametrize("acceptance", [(), [0.8, 0.7, 0.6]])
def test_where_no_draft_was_measured_nobody_drafts_unless_it_is_ordered(acceptance):
    undrafted = LatencyTable.calibrated({k: MEASURED.by_batch(k) for k in (OFF, 0)})
    run, ordered = RunDecision(REPLICAS), RunDecision(REPLICAS, policy="fixed")
    for made in (run, ordered):
        made.rollout.calibrated(undrafted)
    assert run.drafting(acceptance) == [] and "tlt.speculation.arms" in run.rollout.against
    assert ordered.drafting(acceptance) == REPLICAS
    assert RunDecision(REPLICAS, arms=(0,)).drafting(acceptance) == []
    assert RunDecision(REPLICAS, policy="fixed", arms=(0,)).drafting(acceptance) == REPLICAS


def test_a_draft_measured_cheaper_than_no_drafter_at_all_is_taken_to_cost_as_much():
    table = LatencyTable.calibrated({OFF: [(1, 0.020)], 0: [(1, 0.020)], 1: [(1, 0.015)]})
    assert saving([0.06], LatencyModel((0, 1), table=table), {1: 100}) == pytest.approx(1 - 1 / 1.06)


@pytest.mark.parametrize(("work", "drafts"), [({1: 900, 32: 320}, True), ({1: 10, 32: 32000}, False)])
def test_it_counts_where_the_last_rollout_spent_its_time(work, drafts):
    made = decision()
    made.learn(rollout(work), None)
    assert made.drafts(MEDIOCRE) == drafts
    made.learn([EngineStats()], None)  # an empty step says nothing
    assert made.drafts(MEDIOCRE) == drafts


def test_a_drafter_must_promise_more_while_none_has_been_tried():
    made = decision()
    made.learn(rollout({1: 100}), None)
    assert not made.drafts(SOME)
    made.learn(rollout({1: 100}), 0.1)
    assert made.drafts(SOME)


@pytest.mark.parametrize(("policy", "source"), [("fixed", "eagle"), ("goodput", "ngram"), ("table", "ngram")])
def test_what_was_ordered_and_what_needs_no_drafter_is_never_off(policy, source):
    made = decision(policy, source)
    made.learn(rollout({8: 100}), -0.9)
    assert made.drafts([0.01])
    assert not decision("off", source).drafts([0.9])


@pytest.mark.parametrize(("gain", "then"), [(0.05, REPLICAS), (-0.2, ["b"]), (None, ["b"])])
def test_a_gain_of_some_per_cent_is_tried_by_one_replica_after_the_other_until_it_is_known(gain, then):
    """An engine that was started without a drafter tells none."""
    run = RunDecision(REPLICAS)
    run.rollout.calibrated(MEASURED)
    run.rollout.learn(rollout({1: 100}), None)
    assert run.drafting(SOME) == ["a"] == run.drafting(SOME), "asked twice before a rollout"
    run.learn({"a": rollout({1: 100})[0], "b": rollout({1: 100})[0]}, gain)
    assert run.drafting(SOME) == then
    assert run.drafting([0.2, 0.2, 0.2]) == [], "less than 3 % would be saved"


def learn(run, gain, accepted=0.8, drafting=REPLICAS, acceptance=ACCEPTANCE, drafts=1000, steps=None):
    """A rollout in which these replicas drafted two tokens in nine of ten steps."""
    run.drafting(acceptance)
    drafted = EngineStats(
        num_drafts=drafts, num_accepted_tokens_per_pos=(round(drafts * accepted), round(0.6 * drafts * accepted)),
        steps_by_draft_length=steps or {2: 90, 0: 10},
    )  # fmt: skip
    stats = {n: drafted if n in drafting else EngineStats(steps_by_draft_length={OFF: 100}) for n in REPLICAS}
    return run.learn(stats, gain)


@pytest.fixture
def disabled():
    """(A run in which speculation has just been disabled, what it said)"""
    run = RunDecision(REPLICAS)
    *_, said = [learn(run, -0.2) for _ in range(IN_A_ROW)]
    return run, said


def until_probe(run):
    """Rollouts until one is a probe's, and its replica."""
    waited = 0
    while not (probe := run.drafting(ACCEPTANCE)):
        assert learn(run, None, drafting=[]) is None
        waited += 1
    return waited, probe


def test_rollouts_that_drafting_made_slower_disable_it_with_the_cause(disabled):
    run, said = disabled
    assert "accept length of 2.28 does not make up" in said and run.cause in said
    assert run.drafting(ACCEPTANCE) == []


@pytest.mark.parametrize(
    ("gains", "disables"),
    [
        ([-0.2, -0.2, 0.1, -0.2, -0.2], False), ([-0.02] * 9, False), ([None] * 9, False),
        ([-0.2, -0.05, None, -0.04], True),
    ],
)  # fmt: skip
def test_only_several_in_a_row_do(gains, disables):
    run = RunDecision(REPLICAS)
    for gain in gains:
        learn(run, gain)
    assert bool(run.cause) == disables


@pytest.mark.parametrize("acceptance", [ACCEPTANCE, ()], ids=["known", "unknown"])
def test_after_a_loss_one_replica_after_the_other_tries_again(acceptance):
    """Two percent may be noise; a rollout in which nothing could be compared proves nothing."""
    run = RunDecision(REPLICAS)
    for gain, then in ((-0.02, REPLICAS), (-0.05, ["b"]), (None, ["a"]), (-0.05, ["b"]), (-0.02, REPLICAS)):
        assert learn(run, gain, acceptance=acceptance) is None
        assert run.drafting(acceptance) == then


def test_drafts_that_are_never_accepted_disable_it_even_where_nothing_can_be_compared():
    """Even if the policy, which learned that within ten steps, drafts next to nothing from then on."""
    for few in {}, {"drafts": 250, "steps": {0: 990, 1: 10}}:
        run, ngrams = RunDecision(REPLICAS), RunDecision(REPLICAS, source="ngram")
        said = [learn(run, None, accepted=0.02, **few) for _ in range(IN_A_ROW)]
        assert said[:-1] == [None, None] and "accept length 1.03): a drafter of another policy" in said[-1]
        assert [learn(ngrams, None, accepted=0.02, **few) for _ in range(9)] == [None] * 9


def test_a_few_drafts_are_no_evidence_but_the_time_that_the_drafters_pass_takes_is():
    few, run = {"drafts": 9, "steps": {0: 999, 1: 1}}, RunDecision(REPLICAS)
    assert [learn(run, None, accepted=0.0, **few) for _ in range(9)] == [None] * 9
    *_, said = [learn(run, -0.05, accepted=0.0, **few) for _ in range(IN_A_ROW)]
    assert "does not make up for what drafting costs" in said


def test_an_order_is_followed_with_one_warning_and_rollouts_without_drafts_say_nothing():
    ordered, off = RunDecision(REPLICAS, policy="fixed"), RunDecision(REPLICAS)
    said = [learn(ordered, -0.5, accepted=0.0) for _ in range(9)]
    assert [bool(s) for s in said] == [False, False, True, *[False] * 6] and "as ordered" in said[2]
    assert [learn(off, None, drafting=[]) for _ in range(9)] == [None] * 9
    assert not ordered.cause and not off.cause and ordered.drafting(ACCEPTANCE) == REPLICAS


def test_it_is_enabled_again_when_a_probe_gains_and_waits_longer_when_it_does_not(disabled):
    run, seen = disabled[0], []
    for _ in range(5):
        waited, probe = until_probe(run)
        seen.append((waited, *probe))
        assert learn(run, -0.1, drafting=probe) is None
    assert seen == [(FIRST_WAIT, "b"), (16, "a"), (32, "b"), (LONGEST_WAIT, "a"), (LONGEST_WAIT, "b")]
    _, probe = until_probe(run)
    assert "saved 20%" in learn(run, 0.2, drafting=probe, steps={0: 400, 3: 240}), "in a rollout with a long tail"
    assert not run.cause and run.drafting(ACCEPTANCE) == REPLICAS


def test_while_disabled_a_better_drafter_is_tried_before_its_time(disabled):
    run, better = disabled[0], [0.99, 0.99]
    assert run.drafting([0.91, 0.91]) == [] and run.drafting(better) == ["b"]
    assert learn(run, -0.1, drafting=["b"], acceptance=better) is None
    assert run.drafting(better) == [], "once"
    assert until_probe(run)[0] == 16


@pytest.mark.parametrize(
    ("gain", "accepted", "drafting"), [(0.01, 0.8, ["a"]), (0.2, 0.0, ["a"]), (0.2, 0.8, []), (None, 0.8, ["a"])]
)
def test_what_is_no_evidence_does_not_enable_it(disabled, gain, accepted, drafting):
    """A gain within the noise; one without anything accepted; an engine that did not draft; nothing to compare."""
    run, _ = disabled
    until_probe(run)
    assert learn(run, gain, accepted, drafting) is None and run.cause
