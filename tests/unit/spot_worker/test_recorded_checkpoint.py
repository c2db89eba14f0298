"""A run goes on from a checkpoint that an earlier commit wrote: `recorded_checkpoint`, files that no test writes.

The learner that saved it had published once and was ahead of that: candidate, served and initial drafter are three.
`resumed.json` is what it said of itself (`messages.training.Resumed`).
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_learner import CONFIG, SAMPLING, texts, verifier_arrays

from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.trainer.checkpoints import saved_drafter
from verl_tlt.trainer.run_setup import first_drafter

RECORDED = Path(__file__).parent / "recorded_checkpoint"


@pytest.fixture
def step_dir(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "run")
    return tmp_path / "run" / "global_step_3"


@pytest.fixture
def start(step_dir):
    return first_drafter(CONFIG, str(step_dir.parent / "policy"), "bfloat16", 64, step_dir)


def test_the_run_starts_with_what_was_served(step_dir, start):
    assert (start.served.version, start.served.acceptance) == (1, (0.5, 0.4, 0.3))
    assert start.tokens_trained == 1234 and start.aux_layers == (1, 2, 3)
    assert str(saved_drafter(step_dir)) in start.origin


def test_its_learner_goes_on_with_every_version_and_the_optimizer(step_dir, start):
    learner = SpotLearner("a", CONFIG, str(step_dir.parent / "policy"), start.trainable, SAMPLING, "cpu")
    resumed = learner.resume(str(saved_drafter(step_dir)))
    assert asdict(resumed) == json.loads((RECORDED / "resumed.json").read_text())
    saved = load_file(step_dir / "tlt_drafter" / "model.safetensors")
    served = learner.versions.served
    assert all(np.array_equal(value, saved[name].numpy()) for name, value in served.items())
    learner.add(4, texts(20), verifier_arrays())
    result = learner.train(lambda: False)
    assert result.steps > 0 and result.skipped == 0 and np.isfinite(result.loss)
    assert learner.trainer.steps == resumed.steps + result.steps
