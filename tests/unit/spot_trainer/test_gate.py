"""The gate's decisions, and whether its error rates on simulated scores are what it claims."""

import dataclasses
import math

import numpy as np
import pytest

from verl_tlt import bootstrap
from verl_tlt.spot_trainer import gate
from verl_tlt.spot_trainer.gate import (
    MIN_POSITIONS,
    MIN_PROMPTS,
    MOST_POSITIONS,
    HeldOutScores,
    decide,
    positions_to_score,
    undecidable,
)

K = 3


def simulate(rng, *, sequences=40, versus_served=0.0, versus_initial=None, length=400, spread=0.8, group=1):
    """Scores of drafters whose true relative accept lengths are known; accept length about 2.1, long-tailed sequences.

    Drafters share each sequence's difficulty and number of drafts; what differs between them varies by sequence and by
    position, about as measured (standard deviation 0.2 a position). The noise is added to a ratio's numerator alone,
    which leaves the true ratio exact. With a `group` of several, what a prompt brings is alike in all its sequences.
    """
    positions = np.maximum(8, length * np.exp(rng.normal(0.0, spread, sequences))).astype(int)
    tau = rng.uniform(1.6, 2.6, sequences)  # [S], the candidate's
    drafts = positions / tau

    def drafter(relative):
        of_prompt = np.repeat(rng.normal(0.0, 0.03, sequences // group), group)
        noise = of_prompt + rng.normal(0.0, 0.2, sequences) / np.sqrt(positions)
        return counts(drafts, tau * (1.0 + relative) + noise)

    served = drafter(1.0 / (1.0 + versus_served) - 1.0)
    initial = served if versus_initial is None else drafter(1.0 / (1.0 + versus_initial) - 1.0)
    prompts = np.repeat(np.arange(sequences // group), group)
    return HeldOutScores(prompts, positions, counts(drafts, tau), served, initial)


def counts(drafts, tau):
    """[S, 1+K] for drafts [S] and accept lengths [S]; acceptance falls by position."""
    survival = np.array([0.5, 0.3, 0.2])  # sums to 1
    return np.column_stack([drafts, (drafts * (tau - 1.0))[:, None] * survival])


def rates(draws, **truth):
    rng = np.random.default_rng(1)
    found = [decide(simulate(rng, **truth), seed=i) for i in range(draws)]
    to = {False: "reverted_to_served", True: "reverted_to_initial"}
    decisions = [to[v.publishes] if v.decision == "reverted" else v.decision for v in found]
    return {d: decisions.count(d) / draws for d in ("published", "kept", *to.values())}


def no_more_than(claimed, draws):
    """The claimed rate and three standard deviations of its measurement."""
    return claimed + 3.0 * math.sqrt(claimed * (1.0 - claimed) / draws)


# ---------------------------------------------------------------- error rates


@pytest.fixture
def quick(monkeypatch):
    """Half of the resamples: thousands of decisions in seconds, at a slightly coarser percentile."""
    monkeypatch.setattr(bootstrap, "DRAWS", 1000)


@pytest.mark.parametrize("sequences", [8, 40])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_a_candidate_at_the_margin_is_published_no_more_often_than_claimed(sequences, spread, quick):
    at = {"versus_served": -gate.MARGIN, "sequences": sequences, "spread": spread}
    assert rates(400, **at)["published"] <= no_more_than(gate.ERROR, 400)


def test_responses_to_one_prompt_are_no_evidence_of_their_own(quick):
    """Sixteen to a prompt: what suits a drafter in one of them suits it in all, and ten prompts are ten, not 160."""
    at = {"versus_served": -gate.MARGIN, "sequences": 160, "group": 16, "spread": 0.3}
    assert rates(400, **at)["published"] <= no_more_than(gate.ERROR, 400)


@pytest.mark.parametrize("sequences", [8, 40])
def test_a_candidate_at_the_revert_line_is_reverted_no_more_often_than_claimed(sequences, quick):
    at = {"versus_served": -gate.WORSE, "sequences": sequences}
    assert rates(400, **at)["reverted_to_served"] <= no_more_than(gate.ERROR, 400)


def test_choosing_the_better_of_served_and_initial_does_not_spoil_the_revert_rate(quick):
    at = {"versus_served": -gate.WORSE, "versus_initial": -gate.WORSE, "sequences": 40}
    measured = rates(600, **at)
    assert measured["reverted_to_served"] + measured["reverted_to_initial"] <= no_more_than(gate.ERROR, 600)


def test_clearly_worse_is_hardly_ever_published_and_equal_hardly_ever_reverted(quick):
    assert rates(200, versus_served=-0.02)["published"] <= 0.01
    equal = rates(200, versus_served=0.0)
    assert equal["reverted_to_served"] + equal["reverted_to_initial"] <= 0.01


def test_real_differences_are_seen(quick):
    assert rates(200, versus_served=0.02)["published"] > 0.9
    assert rates(200, versus_served=-0.04)["reverted_to_served"] > 0.9
    assert rates(200, versus_served=0.10, versus_initial=-0.04)["reverted_to_initial"] > 0.9


# ---------------------------------------------------------------- rules


def test_prompts_are_counted_and_not_their_responses():
    few = decide(simulate(np.random.default_rng(0), sequences=60, group=10, versus_served=-0.1), seed=0)
    assert (few.decision, few.gain) == ("kept", None) and "of 6 held-out prompts" in few.reason


@pytest.mark.parametrize(("positions", "sequences"), [(511, 50), (5000, 6)])
def test_with_too_little_to_judge_only_a_useless_drafter_is_replaced(positions, sequences):
    n = np.zeros(60, dtype=int)  # sequences too short to be judged do not count
    n[:sequences] = positions // sequences
    n[0] += positions - n.sum()
    worse, better = counts(n, np.full(60, 1.5)), counts(n, np.full(60, 2.5))
    found = decide(HeldOutScores(np.arange(len(n)), n, worse, better, better), seed=0)
    assert (found.decision, found.gain) == ("kept", None)
    assert f"{positions} positions of {sequences} held-out prompts" in found.reason
    nothing = np.zeros_like(n)  # responses that are no longer than a draft
    unknown = decide(HeldOutScores(np.arange(len(n)), nothing, *[counts(nothing, np.ones(60))] * 3), seed=0)
    assert unknown.decision == "kept" and "0 positions of 0 held-out prompts" in unknown.reason
    useless = counts(n, np.full(60, 1.05))
    published = decide(HeldOutScores(np.arange(len(n)), n, useless, useless, useless), seed=0)
    assert published.decision == "published" and "hardly ever accepted" in published.reason
    assert decide(HeldOutScores(np.arange(len(n)), n, worse, useless, better), seed=0).decision == "kept"
    n[:sequences] += 1
    n[sequences] += 1
    worse, better = counts(n, np.full(60, 1.5)), counts(n, np.full(60, 2.5))
    assert decide(HeldOutScores(np.arange(len(n)), n, worse, better, better), seed=0).decision == "reverted"


def test_better_than_served_but_seen_to_be_worse_than_initial_keeps_what_is_served():
    scores = simulate(np.random.default_rng(3), sequences=8, versus_served=0.2, versus_initial=-0.02)
    assert scores.accept_length("candidate") < scores.accept_length("initial")
    found = decide(scores, seed=0)
    assert (found.decision, found.publishes) == ("kept", False)
    assert "initial" in found.reason


def test_a_candidate_with_nan_scores_goes_back_to_the_better_one():
    scores = simulate(np.random.default_rng(0), versus_served=0.1, versus_initial=-0.1)
    broken = scores.candidate.copy()
    broken[3, 1] = np.nan
    found = decide(dataclasses.replace(scores, candidate=broken), seed=0)
    assert (found.decision, found.publishes, found.gain) == ("reverted", True, None)
    assert "not finite" in found.reason


def test_accept_length_and_conditional_acceptance():
    drafter = np.array([[10.0, 8.0, 4.0, 1.0], [30.0, 12.0, 6.0, 0.0]])
    scores = HeldOutScores(np.arange(2), np.array([23, 48]), drafter, drafter, drafter)
    assert scores.accept_length("served") == pytest.approx(1 + 31 / 40)
    assert scores.acceptance("candidate") == pytest.approx([20 / 40, 10 / 20, 1 / 10])
    empty = np.zeros((1, 4))
    nothing = HeldOutScores(np.arange(1), np.array([0]), empty, empty, empty)
    assert nothing.accept_length("initial") == 1.0 and nothing.acceptance("served") == (0.0, 0.0, 0.0)


def test_the_verdict_says_what_the_rl_trainer_has_to_know():
    scores = simulate(np.random.default_rng(0), versus_served=0.1, versus_initial=0.2)
    found = decide(scores, seed=0)
    assert (found.decision, found.publishes) == ("published", True)
    assert found.gain == pytest.approx(0.1, abs=0.02)
    assert found.tau["candidate"] > found.tau["served"] > found.tau["initial"]
    assert found.acceptance == scores.acceptance("candidate")
    for serves, versus_served, versus_initial in (("served", -0.1, 0.2), ("initial", 0.1, -0.1)):
        scores = simulate(np.random.default_rng(0), versus_served=versus_served, versus_initial=versus_initial)
        back = decide(scores, seed=0)
        assert (back.decision, back.publishes) == ("reverted", serves == "initial")
        assert back.acceptance == scores.acceptance(serves)


def test_the_interval_of_three_measurements_is_students():
    """A table says 4.303; the expansion alone gives 4.17."""
    assert bootstrap.student(0.975, 2.0) == pytest.approx(4.303, abs=1e-3)


@pytest.mark.parametrize(
    ("trained", "max_draft", "scored"), [(4000, 1, 1000), (4000, 3, 1000), (4000, 6, 500), (10**9, 3, MOST_POSITIONS)]
)
def test_a_fifth_of_the_work_is_scoring_which_longer_drafts_make_dearer(trained, max_draft, scored):
    assert positions_to_score(trained, max_draft) == scored


@pytest.mark.parametrize(
    ("positions", "prompts", "served", "scores"),
    [
        (MIN_POSITIONS, MIN_PROMPTS, 2.0, True),
        (MIN_POSITIONS - 1, MIN_PROMPTS, 2.0, False),
        (MIN_POSITIONS, MIN_PROMPTS - 1, 2.0, False),
        (MIN_POSITIONS - 1, 1, 1.0, True),  # such a drafter is replaced by any that is accepted at all
    ],
)
def test_text_that_cannot_decide_is_not_scored(positions, prompts, served, scores):
    found = undecidable(positions, prompts, served)
    assert (found is None) == scores
    if found:
        assert (found.decision, found.publishes) == ("kept", False) and f"({positions} positions of" in found.reason
