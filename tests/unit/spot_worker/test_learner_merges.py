"""What a merge in slices does to learners: it is the merge, all end on the same bits, and nobody's progress is lost."""

import numpy as np
import pytest
from tiny_learner import CONFIG, make_learner, texts, verifier_arrays

from verl_tlt.spot_worker.merge import merge
from verl_tlt.spot_worker.merge_slices import join

SLICES = 3
MIN_STEPS = CONFIG.spot.min_merge_steps


@pytest.fixture
def learners(tmp_path):
    """Three of a kind: two have trained on texts of their own, one has not."""
    made = [make_learner(tmp_path / "policy") for _ in range(3)]
    for i, (learner, name) in enumerate(zip(made, "abc", strict=True)):
        learner.name = name
        learner.add(1, texts(60, seed=i), verifier_arrays())
    for learner in made[:2]:
        while learner.unmerged_steps < MIN_STEPS:
            learner.train(lambda: False)
    return made


def merge_in_slices(learners, trained):
    parts = [learner.hand_in(SLICES) for learner in trained]
    slices = tuple(join(column, last=True) for column in zip(*parts, strict=True))
    for learner in learners:
        learner.adopt_slices(slices)
    return slices[0].facts


def now(learner):
    return learner.trainer.parameters_numpy()


def test_all_end_on_the_same_version_which_is_the_merges(learners):
    first, second, idle = learners
    contributions = [first.contribute(), second.contribute()]
    wanted = merge(contributions, min_steps=MIN_STEPS)
    before = idle.base
    facts = merge_in_slices(learners, [first, second])
    assert (facts.included, facts.tokens) == (wanted.included, wanted.tokens)
    for name, old in before.items():
        assert any(c.delta[name].any() for c in contributions)
        top = max(np.abs(c.delta[name]).max() for c in contributions)
        np.testing.assert_allclose(first.base[name], old + wanted.delta[name], rtol=0, atol=4 * top / 65534 + 1e-7)
        for learner in learners:
            assert np.array_equal(learner.base[name], first.base[name])
            assert np.array_equal(now(learner)[name], first.base[name])
            assert not np.shares_memory(learner.base[name], learner._live()[name]), "training would change both"
    assert [(learner.unmerged_steps, learner.unmerged_tokens) for learner in learners] == [(0, 0)] * 3


def test_one_with_too_few_steps_keeps_its_progress(learners):
    first, second, _ = learners
    second.unmerged_steps = MIN_STEPS - 1
    own = second.contribute().delta
    facts = merge_in_slices(learners, [first, second])
    assert facts.included == ("a",) and "fewer than" in facts.excluded["b"]
    for name, delta in own.items():
        assert np.array_equal(second.base[name], first.base[name])
        np.testing.assert_allclose(now(second)[name], first.base[name] + delta, rtol=0, atol=1e-6)
    assert second.unmerged_steps == MIN_STEPS - 1


def test_one_with_broken_numbers_starts_again(learners):
    first, second, _ = learners
    next(iter(second.trainer.parameters.values())).data.view(-1)[0] = np.nan
    facts = merge_in_slices(learners, [first, second])
    assert facts.included == ("a",) and "not finite" in facts.excluded["b"]
    assert all(np.array_equal(now(second)[name], first.base[name]) for name in first.base)
    assert second.trainer.steps == second.unmerged_steps == 0


def test_where_everybody_is_left_out_nothing_moves(learners):
    first, second, _ = learners
    first.unmerged_steps = second.unmerged_steps = 1
    before, trained = first.base, now(first)
    assert merge_in_slices(learners, [first, second]).included == ()
    assert first.base is before and not first.unjudged
    assert all(np.allclose(now(first)[name], trained[name], rtol=0, atol=1e-6) for name in trained)
