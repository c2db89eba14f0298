"""What the gate's scores cost: versions that are the same only once, and a share of the session.

Looks at the stop flag are one per version that differs and portion of the text.
"""

from itertools import chain, repeat
from unittest.mock import Mock

import numpy as np
import pytest
from tiny_learner import CONFIG, make_learner, texts, train_and_merge, verifier_arrays

from verl_tlt.drafter.data import grouped
from verl_tlt.spot_worker.buffer import FEWEST_PROMPTS, HELD_OUT_TOKENS, JUDGING_SHARE, PORTION, tokens_to_judge
from verl_tlt.trainer.drafter_update import MIN_PROMPTS

LONGEST = CONFIG.speculation.longest


@pytest.fixture
def learner(tmp_path):
    learner = make_learner(tmp_path / "policy")
    for step in range(4):
        learner.add(step, texts(8, seed=step), verifier_arrays())
    return learner


def score(learner, max_draft=LONGEST, should_stop=lambda: False):
    """All that is held out."""
    return learner._score_held_out(learner.buffer.held_out(), max_draft, should_stop)


def looks_of(learner):
    look = Mock(return_value=False)
    scores = score(learner, 2, look)
    assert scores is not None and len(scores.positions)
    return scores, look.call_count


def test_a_version_that_is_two_of_the_three_is_scored_once(learner):
    scores, looks = looks_of(learner)
    assert (scores.candidate == scores.served).all() and (scores.served == scores.initial).all()

    train_and_merge(learner)
    apart, three = looks_of(learner)
    assert (apart.served == scores.served).all() and (apart.candidate != apart.served).any()
    assert three == 2 * looks, "candidate, and what is both served and initial"

    learner.mark_published()
    served, both = looks_of(learner)
    assert (served.candidate == served.served).all() and (served.served != served.initial).any()
    assert (served.candidate == apart.candidate).all() and both == 2 * looks


def test_a_stop_waits_no_longer_for_scores_than_for_learning(learner):
    _, looks = looks_of(learner)
    held_out, micro_batch = learner.buffer.held_out(), learner.config.drafter.rows
    assert micro_batch < sum(map(len, held_out)) < PORTION
    assert looks == len(list(grouped(held_out, len, micro_batch)))


@pytest.mark.parametrize(
    ("most", "tokens", "share", "ran_out", "wanted"),
    [
        (10_000, 10_000, JUDGING_SHARE, False, 10_000),
        (10_000, 10_000, JUDGING_SHARE * 1.25, False, 8_000),
        (10_000, 10_000, JUDGING_SHARE / 1.5, False, 15_000),
        (10_000, 10_000, 1.0, False, 5_000),
        (10_000, 10_000, 0.0, False, 20_000),
        (10_000, 10_000, 0.9, True, 10_000),
        (10_000, 10_000, 0.05, True, 20_000),
        (10_000, 10_000, None, False, 5_000),
        (PORTION + 1, PORTION + 1, None, False, PORTION),
        (HELD_OUT_TOKENS - 1, HELD_OUT_TOKENS - 1, 0.0, True, HELD_OUT_TOKENS),
        (20_000, 0, 0.0, False, 20_000),  # little that is held out is no reason to look at less later
        (20_000, 3_000, JUDGING_SHARE / 5, False, 20_000),
        (20_000, 3_000, 2 * JUDGING_SHARE, False, 1_500),
    ],
)
def test_the_next_judging_costs_its_share_of_a_session_like_the_last(most, tokens, share, ran_out, wanted):
    assert tokens_to_judge(most, tokens, share, ran_out=ran_out) == pytest.approx(wanted, abs=1)


@pytest.fixture
def pending(learner, monkeypatch):
    """A learner whose candidate waits for scores, kept every two sequences of 20 tokens."""
    monkeypatch.setattr("verl_tlt.spot_worker.learner.CPU_TOKENS", 40)
    monkeypatch.setattr("verl_tlt.spot_worker.buffer.PORTION", 40)
    train_and_merge(learner)
    assert len(learner.buffer.held_out()) > 12
    return learner


def stop_after(looks):
    return Mock(side_effect=chain(repeat(False, looks), repeat(True)))


def judge(learner, looks):
    """Results of sessions of so many looks at the stop flag, up to the one that has scores."""
    results = []
    while len(results) < 50:
        results.append(learner.train(stop_after(looks)))
        if results[-1].scores is not None:
            return results
        assert results[-1].steps == 0 and learner.versions.to_judge
    raise AssertionError("no verdict")


def test_sessions_too_short_to_score_all_that_is_held_out_come_to_a_verdict_and_look_at_less_later(pending):
    held_out = pending.buffer.held_out()
    *stopped, result = judge(pending, 5)  # two portions of two versions
    assert len(stopped) == 1 and 8 <= len(result.scores.positions) < len(held_out)
    assert not pending.versions.to_judge and pending._to_judge < sum(map(len, held_out))


def test_scores_of_a_session_that_was_stopped_are_kept_and_equal_those_of_one_session(pending, monkeypatch):
    whole = score(pending)
    pending._judging = None
    asked = Mock(side_effect=lambda most, *_, **__: most)  # all of it
    monkeypatch.setattr("verl_tlt.spot_worker.learner.tokens_to_judge", asked)
    results = judge(pending, 3)  # one portion of two versions, and a look in between
    result = results[-1]
    assert len(results) > 6 and (np.sort(result.scores.prompts) == np.sort(whole.prompts)).all()
    share = sum(one.judged_s for one in results) / sum(one.seconds for one in results)
    assert [call.args[2] for call in asked.call_args_list] == [None] * (len(results) - 1) + [pytest.approx(share)]
    for which in ("candidate", "served", "initial"):
        assert result.scores.of(which).sum(0) == pytest.approx(whole.of(which).sum(0), rel=1e-5)


def test_what_a_version_did_not_get_to_is_scored_again_for_all(pending):
    assert pending.train(stop_after(1)).scores is None, "the candidate's first portion, and not the served one's"
    *_, result = judge(pending, 1000)
    assert len({len(result.scores.of(which)) for which in ("candidate", "served", "initial")}) == 1


def test_another_candidate_is_judged_by_scores_of_its_own(pending):
    assert pending.train(stop_after(5)).scores is None
    assert pending._judging.tokens > 0
    pending.revert("initial")
    train_and_merge(pending)
    pending._to_judge = HELD_OUT_TOKENS
    *_, result = judge(pending, 1000)
    assert result.scores.candidate == pytest.approx(score(pending).candidate, rel=1e-5)


def test_however_long_sequences_are_the_gate_sees_enough_of_them(learner):
    assert FEWEST_PROMPTS >= MIN_PROMPTS
    assert len(learner.buffer.held_out(1, FEWEST_PROMPTS)) == FEWEST_PROMPTS < len(learner.buffer.held_out())
