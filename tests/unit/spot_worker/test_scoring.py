"""What the gate's scores cost: versions that are the same only once, and a share of the session.

Looks at the stop flag are one per version that differs and portion of the text.
"""

import pytest
from tiny_learner import make_learner, texts, train_and_merge, verifier_arrays

from verl_tlt.drafter.data import grouped
from verl_tlt.spot_worker import scoring
from verl_tlt.spot_worker.scoring import FEWEST_PROMPTS, HELD_OUT_TOKENS, JUDGING_SHARE, PORTION, tokens_to_judge
from verl_tlt.trainer.gate import MIN_PROMPTS


@pytest.fixture
def learner(tmp_path):
    learner = make_learner(tmp_path / "policy")
    for step in range(4):
        learner.add(step, texts(8, seed=step), verifier_arrays())
    return learner


def looks_of(learner):
    looks = []
    scores = learner._score_held_out(learner.buffer.held_out(), 2, lambda: bool(looks.append(None)))
    assert scores is not None and len(scores.positions)
    return scores, len(looks)


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
    ("share", "ran_out", "factor"),
    [
        (JUDGING_SHARE, False, 1.0),
        (JUDGING_SHARE * 1.25, False, 0.8),
        (JUDGING_SHARE / 1.5, False, 1.5),
        (1.0, False, 0.5),
        (0.0, False, 2.0),
        (0.9, True, 1.0),
        (0.05, True, 2.0),
        (None, False, 0.5),
    ],
)
def test_the_next_judging_costs_its_share_of_a_session_like_the_last(share, ran_out, factor):
    assert tokens_to_judge(10_000, 10_000, share, ran_out=ran_out) == pytest.approx(10_000 * factor, abs=1)


def test_there_is_a_least_and_a_most_to_look_at():
    assert tokens_to_judge(PORTION + 1, PORTION + 1, None, ran_out=False) == PORTION
    assert tokens_to_judge(HELD_OUT_TOKENS - 1, HELD_OUT_TOKENS - 1, 0.0, ran_out=True) == HELD_OUT_TOKENS


def test_little_that_is_held_out_is_no_reason_to_look_at_less_later():
    assert tokens_to_judge(20_000, 0, 0.0, ran_out=False) == 20_000
    assert tokens_to_judge(20_000, 3_000, JUDGING_SHARE / 5, ran_out=False) == 20_000
    assert tokens_to_judge(20_000, 3_000, 2 * JUDGING_SHARE, ran_out=False) == 1_500, "that much was too much already"


def test_a_session_that_is_stopped_while_it_scores_has_the_next_look_at_less(learner, monkeypatch):
    """Whatever is held out, sessions too short to score it all come to a verdict, and then to learning."""
    monkeypatch.setattr(scoring, "PORTION", 64)
    train_and_merge(learner)
    held_out = sum(map(len, learner.buffer.held_out()))
    assert held_out > 4 * 64
    looked_at, looks = [], []

    def stop_after_a_while():
        looks.append(None)
        return len(looks) > 6  # 3 portions of two versions

    for _ in range(10):
        looks.clear()
        looked_at.append(learner._to_judge)
        result = learner.train(stop_after_a_while)
        if result.scores is not None:
            break
        assert result.steps == 0 and learner.versions.to_judge
    assert looked_at[:2] == [HELD_OUT_TOKENS, held_out // 2] and result.scores.positions.sum() > 0


def test_however_long_sequences_are_the_gate_sees_enough_of_them(learner):
    assert FEWEST_PROMPTS >= MIN_PROMPTS
    assert len(learner._held_out(1)) == FEWEST_PROMPTS < len(learner.buffer.held_out())
