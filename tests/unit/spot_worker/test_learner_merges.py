"""What a merge does to learners: all end on the same bits, and no progress is lost."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_learner import CONFIG, learner_arguments, make_learner, merge_learners, same, texts, verifier_arrays

from verl_tlt.spot_worker.learner import SpotLearner

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


def now(learner):
    """What it would hand in: the average of its weights."""
    return {name: average.numpy().copy() for name, average in learner.trainer.averages().items()}


def less(left, right):
    return {name: value - right[name] for name, value in left.items()}


def assert_near(found, wanted, atol=1e-6):
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol)


def test_all_end_on_the_same_version_which_is_the_average(learners):
    first, second, _ = learners
    before = first.versions.candidate
    learned = [less(now(learner), before) for learner in (first, second)]
    tokens = [learner.unmerged_tokens for learner in (first, second)]
    facts = merge_learners(learners, [first, second])
    assert (facts.included, facts.tokens) == (("a", "b"), sum(tokens))
    share = max(tokens) / sum(t * t for t in tokens)
    for name, old in before.items():
        top = max(np.abs(change[name]).max() for change in learned)
        assert top > 0
        wanted = old + share * sum(t * change[name] for t, change in zip(tokens, learned, strict=True))
        assert_near(first.versions.candidate, {name: wanted}, atol=4 * top / 65534 + 1e-7)
    for learner in learners:
        assert same(learner.versions.candidate, first.versions.candidate)
        assert same(now(learner), first.versions.candidate)
        assert learner.versions.to_judge and learner.unmerged_steps == learner.unmerged_tokens == 0
    candidate = {name: value.copy() for name, value in first.versions.candidate.items()}
    first.train(lambda: False)
    assert same(first.versions.candidate, candidate), "training changes what it trains, and no version"


def test_its_weights_stay_as_far_ahead_of_their_average_until_it_is_reverted(learners):
    first, *_ = learners
    ahead = less(first.trainer.parameters_numpy(), now(first))
    assert any(value.any() for value in ahead.values())
    merge_learners(learners, [first])
    assert_near(less(first.trainer.parameters_numpy(), first.versions.candidate), ahead)
    first.revert("served")
    assert same(first.trainer.parameters_numpy(), first.versions.served) and same(now(first), first.versions.served)


@pytest.mark.parametrize("head", ["new", "given", "new, but its worker takes a lost one's place"])
def test_what_a_worker_hands_in_of_its_first_session(tmp_path, head):
    """Nearly all that a new head moved, and little of what a head moved that had learned before."""
    name, config, policy, file, sampling = learner_arguments(tmp_path / "policy")
    file = replace(file, acceptance=(0.5, 0.4)) if head == "given" else file
    published = file if head.startswith("new, ") else None
    learner = SpotLearner(name, config, policy, file, sampling, "cpu", published=published)
    learner.add(1, texts(60), verifier_arrays())
    learner.train(lambda: False)
    start = learner.versions.candidate
    changes = [less(there, start).values() for there in (learner.trainer.parameters_numpy(), now(learner))]
    moved, handed = (sum(float(np.sum(value**2)) for value in change) ** 0.5 for change in changes)
    assert handed > 0.5 * moved if head == "new" else 0.0 < handed < 0.25 * moved


def test_one_with_too_few_steps_keeps_its_progress(learners):
    first, second, _ = learners
    second.unmerged_steps = MIN_STEPS - 1
    kept = less(now(second), second.versions.candidate)
    facts = merge_learners(learners, [first, second])
    assert facts.included == ("a",) and "fewer than" in facts.excluded["b"]
    assert same(second.versions.candidate, first.versions.candidate)
    assert_near(less(now(second), first.versions.candidate), kept)
    assert second.unmerged_steps == MIN_STEPS - 1


def test_one_with_broken_numbers_starts_again(learners):
    first, second, _ = learners
    next(iter(second.trainer.averages().values())).view(-1)[0] = np.nan
    facts = merge_learners(learners, [first, second])
    assert facts.included == ("a",) and "not finite" in facts.excluded["b"]
    assert same(now(second), first.versions.candidate)
    assert second.trainer.steps == second.unmerged_steps == 0


def test_where_all_are_left_out_nothing_moves(learners):
    first, second, _ = learners
    first.unmerged_steps = second.unmerged_steps = 1
    before, trained = first.versions, now(first)
    assert merge_learners(learners, [first, second]).included == ()
    assert first.versions is before
    assert_near(now(first), trained)
