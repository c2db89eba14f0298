"""A learner that goes on from a checkpoint holds what was saved: candidate, moments, steps, and both of the gate's
references."""

import pytest
from safetensors.torch import load_file
from tiny_learner import CONFIG, FACTS, SAMPLING, make_learner, same, texts, train_and_merge, verifier_arrays

from verl_tlt.drafter import load_training_state
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.versions import checksum, checksums, moments
from verl_tlt.trainer.run_setup import first_drafter


@pytest.fixture
def learner(tmp_path):
    """It has published once and is ahead of that: candidate, served and initial are three."""
    learner = make_learner(tmp_path / "policy")
    learner.add(1, texts(60), verifier_arrays())
    train_and_merge(learner)
    learner.mark_published()
    train_and_merge(learner)
    return learner


def resumed(learner, tmp_path):
    """(a new learner, what it says it holds), from what this one saves."""
    directory = tmp_path / "global_step_3" / "tlt_drafter"
    learner.save(str(directory), FACTS)
    start = first_drafter(CONFIG, str(tmp_path / "policy"), "bfloat16", 64, directory.parent)
    other = SpotLearner("a", CONFIG, str(tmp_path / "policy"), start.trainable, SAMPLING, "cpu")
    return other, other.resume(str(directory))


def test_it_goes_on_with_everything_the_gate_and_the_optimizer_knew(learner, tmp_path):
    saved = checksums(learner.trainer, learner.versions)
    assert len({saved.candidate, saved.served, saved.initial}) == 3
    other, found = resumed(learner, tmp_path)
    assert found == saved
    for which in ("candidate", "served", "initial"):
        assert same(learner.versions.of(which), other.versions.of(which)), which
    other.revert("initial")
    assert same(other.versions.candidate, learner.versions.initial)


def test_a_candidate_that_is_ahead_is_judged_in_the_first_session(learner, tmp_path):
    other, _ = resumed(learner, tmp_path)
    other.add(2, texts(60), verifier_arrays())
    assert other.train(lambda: False).scores is not None
    assert other.train(lambda: False).scores is None, "once"


def test_its_checksums_are_those_of_the_files(learner, tmp_path):
    _, found = resumed(learner, tmp_path)
    directory = tmp_path / "global_step_3" / "tlt_drafter"
    state, tensors = load_training_state(directory), load_file(directory / "model.safetensors")
    assert found.served == checksum({name: tensors[name] for name in state["parameters"]})
    assert found.candidate == checksum(state["average"]) != found.served
    assert (found.moments, found.steps) == (moments(state["optimizer"]), state["steps"])
    state["optimizer"]["state"]["0"]["exp_avg"].view(-1)[0] += 1e-3
    assert found.moments != moments(state["optimizer"])


def test_one_that_never_published_has_one_reference(tmp_path):
    learner = make_learner(tmp_path / "policy")
    other, found = resumed(learner, tmp_path)
    assert found.served == found.initial == found.candidate
    assert same(other.versions.initial, learner.versions.initial)
    assert not other.versions.to_judge, "it is the served one"
