"""What the gate's scores cost: looks at the stop flag are one per version that differs and portion of the text."""

import pytest
from tiny_learner import make_learner, texts, verifier_arrays

from verl_tlt.spot_worker.merge import merge


@pytest.fixture
def learner(tmp_path):
    learner = make_learner(tmp_path / "policy")
    for step in range(4):
        learner.add(step, texts(8, seed=step), verifier_arrays())
    return learner


def looks_of(learner):
    looks = []
    scores = learner._score_held_out(2, lambda: bool(looks.append(None)))
    assert scores is not None and len(scores.positions)
    return scores, len(looks)


def test_a_version_that_is_two_of_the_three_is_scored_once(learner):
    scores, looks = looks_of(learner)
    assert (scores.candidate == scores.served).all() and (scores.served == scores.initial).all()

    learner.train(lambda: False)
    learner.adopt(learner_delta(learner))
    apart, three = looks_of(learner)
    assert (apart.served == scores.served).all() and (apart.candidate != apart.served).any()
    assert three == 2 * looks, "candidate, and what is both served and initial"

    learner.keep("served")
    served, both = looks_of(learner)
    assert (served.candidate == served.served).all() and (served.served != served.initial).any()
    assert (served.candidate == apart.candidate).all() and both == 2 * looks


def learner_delta(learner):
    """What one worker alone would be merged to."""
    return merge([learner.contribute()], min_steps=1)
