"""OFF for a rollout: by the calibration, after rollouts that drafting made slower, and until when."""

from dataclasses import replace
from itertools import takewhile

import pytest
from step_costs import step_costs

from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs import LatencyPoint, LatencyTable
from verl_tlt.speculation.off import FIRST_WAIT, IN_A_ROW, LONGEST_WAIT, OffDecision, expected_saving, saved_estimate_s
from verl_tlt.speculation.step_statistics import Decoded, undrafted_s
from verl_tlt.speculation.types import OFF

REPLICAS = ["a", "b"]
COSTS = step_costs({OFF: [(1, 0.010), (32, 0.020)], 0: [(1, 0.011), (32, 0.022)], 3: [(1, 0.014), (32, 0.050)]})
UNKNOWN, RANDOM, GOOD, BETTER = (), (0.01, 0.01, 0.01), (0.6, 0.6, 0.6), (0.9, 0.9, 0.9)


def decision(policy="live_table", source="eagle", costs=COSTS):
    made = OffDecision(REPLICAS, policy, source)
    made.calibrated(costs)
    return made


def rollout(
    undrafted_s, decode_s=10.0, drafts=1000, tokens_by_batch=None, accepted=500, names=("a", "b"), k=3, steps=100
):
    stats = EngineStats(
        num_steps=steps, steps_by_draft_length={k: steps},
        num_drafts=drafts, decode_s=decode_s, undrafted_s=undrafted_s, tokens_by_batch=tokens_by_batch or {1: 1000},
        num_accepted_tokens_per_pos=(accepted,), mean_context=100.0,
    )  # fmt: skip
    return dict.fromkeys(names, stats)


@pytest.mark.parametrize(("most_requests", "drafts"), [(None, False), (2, True)])
def test_batches_that_no_rollout_has_do_not_decide_about_the_first_one(most_requests, drafts):
    """Drafts gain with one or two requests, and cost twice as much as they give with 32."""
    costs = step_costs({OFF: [(1, 0.010), (2, 0.010), (32, 0.010)], 3: [(1, 0.011), (2, 0.011), (32, 0.060)]})
    made = OffDecision(REPLICAS, "live_table")
    made.calibrated(costs, most_requests)
    assert bool(made.drafting(GOOD)) == drafts


def test_what_drafts_are_expected_to_save_depends_on_the_contexts_of_the_last_rollout():
    """They pay at 100 tokens of context, and would not at 400."""
    costs = ((32, OFF, 0.010), (1000, OFF, 0.010), (32, 3, 0.014), (1000, 3, 0.060))
    made = decision(costs=LatencyTable(tuple(LatencyPoint(1, *point) for point in costs)))
    for context, drafts in ((100.0, True), (400.0, False)):
        one = replace(rollout(10.0, drafts=0, k=OFF)["a"], mean_context=context)
        made.rollout_ended(dict.fromkeys(REPLICAS, one))
        assert bool(made.drafting(GOOD)) == drafts


def slow(made, rollouts=IN_A_ROW, acceptance=GOOD):
    """Rollouts that drafting makes slower; what is said."""
    said = []
    for _ in range(rollouts):
        assert made.drafting(acceptance)
        said.append(made.rollout_ended(rollout(undrafted_s=9.0)))
    return [one for one in said if one]


@pytest.mark.parametrize(
    ("acceptance", "tokens_by_batch", "drafts"),
    [
        (GOOD, {1: 1000}, True),
        (GOOD, {32: 1000}, False),
        (RANDOM, {1: 1000}, False),
        (UNKNOWN, {32: 1000}, True),
        (BETTER, {32: 1000}, True),
    ],
)
def test_the_calibration_and_the_last_rollouts_batches_decide(acceptance, tokens_by_batch, drafts):
    made = decision()
    made.rollout_ended(rollout(10.0, tokens_by_batch=tokens_by_batch))
    assert made.drafting(acceptance) == (REPLICAS if drafts else [])
    assert bool(made.against) == (not drafts)


def test_what_is_saved_is_that_of_the_best_draft_length_at_each_batch():
    tau = 1 + 0.6 + 0.36 + 0.216
    assert expected_saving(COSTS, GOOD, {1: 100.0}, 32) == pytest.approx(1 - 0.014 / tau / 0.010)
    both = expected_saving(COSTS, GOOD, {1: 100.0, 32: 3200.0}, 32)
    at_32 = min(0.022, 0.050 / tau)
    assert both == pytest.approx(1 - (0.014 / tau + at_32) / 0.030)


def test_a_draft_length_without_a_graph_for_a_batch_saves_nothing_there():
    """Its steps were measured up to smaller batches only, and what follows from them for this one is too fast."""
    costs = step_costs(
        {OFF: [(1, 0.003), (512, 0.004), (1024, 0.010)], 0: [(1, 0.003), (1024, 0.0105)], 1: [(1, 0.003), (256, 0.004)]}
    )
    assert expected_saving(costs, (0.7,), {1024: 100.0}, 32) == pytest.approx(-0.05)
    cell = Decoded(0, 1024, seconds=10.5, tokens=1_024_000, kv_tokens=32_768_000, steps=1000)
    assert undrafted_s([cell], costs) == pytest.approx(10.0)


def test_fixed_and_ngrams_draft_whatever_it_costs():
    for made in (decision("fixed"), decision(source="ngram")):
        assert slow(made, 10) == [] and made.drafting(RANDOM) == REPLICAS and not made.cause


def test_without_a_measured_draft_nothing_is_drafted_and_without_off_it_is_tried():
    undrafted = decision(costs=step_costs({OFF: [(1, 0.01)], 0: [(1, 0.011)]}))
    assert undrafted.drafting(BETTER) == [] and "no step with a draft" in undrafted.never
    unknown = decision(costs=step_costs({0: [(1, 0.011)], 3: [(1, 0.018)]}))
    assert unknown.drafting(RANDOM) == REPLICAS
    assert decision(costs=LatencyTable()).drafting(BETTER) == [], "K would be 0 in every step, and the drafter runs"


def test_three_slow_rollouts_in_a_row_switch_drafting_off_and_fewer_do_not():
    made = decision()
    assert slow(made, IN_A_ROW - 1) == []
    made.rollout_ended(rollout(undrafted_s=12.0))
    (said,) = slow(made)
    assert "switched off after 3 rollouts" in said and "accept length of 1.50" in said
    assert made.drafting(GOOD) == [] and made.cause == made.against


@pytest.mark.parametrize(("k", "steps", "counts"), [(0, 100, True), (0, 20, False), (OFF, 100, False)])
def test_rollouts_count_in_which_the_drafter_ran_although_nothing_was_drafted(k, steps, counts):
    """K=0 saves no pass of the drafter, so a run in which no draft pays would pay for it for ever."""
    made = decision()
    for _ in range(IN_A_ROW):
        made.rollout_ended(rollout(undrafted_s=9.0, drafts=0, k=k, steps=steps))
    assert bool(made.cause) == counts


def test_one_replica_after_the_other_tries_again_at_doubling_intervals():
    made, waits = decision(), []
    slow(made)
    for _ in range(5):
        waited = list(takewhile(lambda drafting: not drafting, (tried(made) for _ in range(200))))
        waits.append(len(waited))
    assert waits == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT, LONGEST_WAIT, LONGEST_WAIT]


def tried(made):
    """One rollout while drafting is switched off; who drafts in it, and loses."""
    drafting = made.drafting(GOOD)
    assert len(drafting) <= 1
    made.rollout_ended(rollout(undrafted_s=9.0, names=drafting) if drafting else rollout(10.0, drafts=0, k=OFF))
    return drafting


def test_a_replica_that_gains_switches_drafting_on_again():
    made = decision()
    slow(made)
    while not (drafting := made.drafting(GOOD)):
        made.rollout_ended(rollout(10.0, drafts=0, k=OFF))
    said = made.rollout_ended(rollout(undrafted_s=13.0, names=drafting))
    assert "switched on again" in said and made.drafting(GOOD) == REPLICAS


def test_a_replica_that_slept_has_not_tried():
    """In `separate_async` those beside the trainer may sleep all the time."""
    made = decision()
    slow(made)
    while not (drafting := made.drafting(GOOD)):
        made.rollout_ended(rollout(10.0, drafts=0, k=OFF))
    others = [name for name in REPLICAS if name not in drafting]
    made.rollout_ended(rollout(10.0, drafts=0, k=OFF, names=others))
    assert made.drafting(GOOD) == others[:1], "the next one, at once"
    made.rollout_ended(dict.fromkeys(REPLICAS, EngineStats(failure="no answer")))
    assert made.drafting(GOOD) == [], "a try of which nothing is known has failed"


def test_what_rollouts_gained_counts_more_than_what_is_expected():
    made = decision()
    made.rollout_ended(rollout(12.0, tokens_by_batch={32: 1000}))
    assert made.drafting(GOOD) == REPLICAS
    made.rollout_ended(rollout(9.0, tokens_by_batch={32: 1000}))
    assert made.drafting(GOOD) == []


def test_where_drafts_are_expected_to_save_nothing_a_replica_tries_now_and_then():
    made = decision()
    undrafted = rollout(10.0, drafts=0, k=OFF, tokens_by_batch={32: 1000})
    made.rollout_ended(undrafted)
    for wait, gains in ((FIRST_WAIT, False), (2 * FIRST_WAIT, True)):
        for _ in range(wait):
            assert made.drafting(GOOD) == [] and made.against and not made.cause
            made.rollout_ended(undrafted)
        drafting = made.drafting(GOOD)
        assert len(drafting) == 1
        drafted = rollout(undrafted_s=13.0 if gains else 9.0, names=drafting, tokens_by_batch={32: 1000})
        said = made.rollout_ended(undrafted | drafted)
    assert "switched on again" in said and made.drafting(GOOD) == REPLICAS


def test_a_random_head_is_not_tried():
    made = decision()
    for _ in range(3 * FIRST_WAIT):
        assert made.drafting((0.0, 0.0)) == []
        made.rollout_ended(rollout(10.0, drafts=0, k=OFF))
    assert made.drafting(BETTER) == REPLICAS


def test_a_better_drafter_is_tried_at_once_by_all():
    made = decision()
    slow(made)
    assert made.drafting(GOOD) == []
    assert made.drafting(BETTER) == REPLICAS and not made.cause
    assert slow(made, IN_A_ROW - 1, BETTER) == [] and made.drafting(BETTER) == REPLICAS, "nothing of before counts"


def test_slow_rollouts_from_before_a_pause_do_not_count_after_it():
    made = decision()
    slow(made, IN_A_ROW - 1)
    at_32 = rollout(9.9, drafts=0, k=OFF, tokens_by_batch={32: 1000})
    made.rollout_ended(at_32)
    assert made.drafting(GOOD) == []
    made.rollout_ended(rollout(10.0, drafts=0, k=OFF))
    assert slow(made, 1) == [] and made.drafting(GOOD) == REPLICAS


def test_seconds_saved_are_those_of_the_slowest_engine_and_none_where_nothing_was_drafted():
    both = rollout(undrafted_s=14.0, decode_s=10.0, names=["a"]) | rollout(undrafted_s=13.0, decode_s=11.0, names=["b"])
    assert saved_estimate_s(both) == 3.0
    assert saved_estimate_s(rollout(undrafted_s=12.0, drafts=0)) == 0.0 == saved_estimate_s({})
    assert saved_estimate_s(rollout(undrafted_s=9.0, drafts=0, k=0)) == -1.0, "the drafter ran, and nothing was drafted"
    assert saved_estimate_s(rollout(undrafted_s=9.0, drafts=0, k=OFF)) == 0.0
    assert saved_estimate_s(both | {"c": EngineStats(failure="it died")}) is None, "it may have been the slowest"
