"""A learner that goes on from a checkpoint holds what was saved: candidate, moments, steps, and both of the gate's
references; also from one that an earlier commit wrote (`recorded_checkpoint`, files that no test writes).

The learner that saved those had published once and was ahead of that: candidate, served and initial drafter are three.
`resumed.json` is what it said of itself (`messages.training.Resumed`).
"""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_learner import FACTS, first_of, make_learner, same, texts, train_and_merge, verifier_arrays

from verl_tlt.drafter import load_training_state
from verl_tlt.drafter.checkpoint import STATE, write_state
from verl_tlt.errors import DrafterError
from verl_tlt.spot_worker.merge import checksum, checksums, moments
from verl_tlt.trainer.checkpoints import saved_drafter

RECORDED = Path(__file__).parent / "recorded_checkpoint"
VERSIONS = ("candidate", "served", "initial")


@pytest.fixture
def learner(tmp_path):
    """It has published once and is ahead of that."""
    learner = make_learner(tmp_path / "policy", 60)
    train_and_merge(learner)
    learner.mark_published()
    train_and_merge(learner)
    return learner


def resumed(learner, tmp_path):
    """(a new learner, what it says it holds), from what this one saves."""
    directory = tmp_path / "global_step_3" / "tlt_drafter"
    learner.save(str(directory), FACTS)
    other = make_learner(tmp_path / "policy", resume_from=directory.parent)
    return other, other.resume(str(directory))


def test_it_goes_on_with_everything_the_gate_and_the_optimizer_knew(learner, tmp_path):
    saved = checksums(learner.trainer, learner.versions)
    assert len({saved.candidate, saved.served, saved.initial}) == 3
    other, found = resumed(learner, tmp_path)
    assert found == saved
    for which in VERSIONS:
        assert same(learner.versions.of(which), other.versions.of(which)), which
    other.add(2, texts(60), verifier_arrays())
    assert other.train(lambda: False).scores is not None, "a candidate that is ahead is judged in the first session"
    assert other.train(lambda: False).scores is None, "once"
    other.revert("initial")
    assert same(other.versions.candidate, learner.versions.initial)


def test_its_checksums_are_those_of_the_files(learner, tmp_path):
    _, found = resumed(learner, tmp_path)
    directory = tmp_path / "global_step_3" / "tlt_drafter"
    state, tensors = load_training_state(directory), load_file(directory / "model.safetensors")
    assert found.served == checksum({name: tensors[name] for name in state["parameters"]})
    assert found.candidate == checksum(state["average"]) != found.served
    assert (found.moments, found.steps) == (moments(state["optimizer"]), state["steps"])
    state["optimizer"]["state"]["0"]["exp_avg"].view(-1)[0] += 1e-3
    assert found.moments != moments(state["optimizer"])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [(torch.ones(1), "is [1], but the drafter's is"), (None, "holds NaN"), (3, "no training state of a drafter")],
)
def test_a_wrong_initial_drafter_is_named_and_changes_nothing(learner, tmp_path, wrong, sentence):
    directory = tmp_path / "global_step_3" / "tlt_drafter"
    learner.save(str(directory), FACTS)
    state = load_training_state(directory)
    name = next(iter(state["initial"]))
    broken = torch.full_like(state["initial"][name], torch.nan) if wrong is None else wrong
    write_state(state | {"initial": {**state["initial"], name: broken}}, directory / STATE)
    other = make_learner(tmp_path / "policy", resume_from=directory.parent)
    before = checksums(other.trainer, other.versions)
    with pytest.raises(DrafterError, match=re.escape(sentence)):
        other.resume(str(directory))
    assert checksums(other.trainer, other.versions) == before


def test_one_that_never_published_has_one_reference(tmp_path):
    learner = make_learner(tmp_path / "policy")
    other, found = resumed(learner, tmp_path)
    assert found.served == found.initial == found.candidate
    assert same(other.versions.initial, learner.versions.initial)
    assert not other.versions.to_judge, "it is the served one"


def test_an_earlier_commits_checkpoint_goes_on_with_every_version_and_the_optimizer(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "run")
    policy, step_dir = tmp_path / "run" / "policy", tmp_path / "run" / "global_step_3"
    start, directory = first_of(policy, resume_from=step_dir), saved_drafter(step_dir)
    assert (start.served.version, start.served.acceptance) == (1, (0.5, 0.4, 0.3))
    assert start.tokens_trained == 1234 and start.aux_layers == (1, 2, 3) and str(directory) in start.origin
    learner = make_learner(policy, resume_from=step_dir)
    resumed = learner.resume(str(directory))
    assert asdict(resumed) == json.loads((RECORDED / "resumed.json").read_text())
    saved = load_file(directory / "model.safetensors")
    assert all(np.array_equal(value, saved[name].numpy()) for name, value in learner.versions.served.items())
    learner.add(4, texts(20), verifier_arrays())
    result = learner.train(lambda: False)
    assert result.steps > 0 and result.skipped == 0 and np.isfinite(result.loss)
    assert learner.trainer.steps == resumed.steps + result.steps
