"""A process that does nothing but save is killed at random moments: what verl would resume is whole, and of one step.

Everything that is written for a step holds that step's number: policy, served drafter, candidate, moments.
"""

import functools
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from policy_config import POLICY as SHAPE
from safetensors.torch import load_file

from verl_tlt.drafter import build_drafter, load_training_state, save_drafter, trainable_parameters
from verl_tlt.trainer.checkpoints import CHECKPOINT, POLICY, followed, saved_drafter

KILLS = 20


@pytest.fixture
def drafter(tmp_path):
    path = tmp_path / "policy"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPE))
    return build_drafter(path)


def named(checkpoints):
    """The step that verl would resume; 0 before the first."""
    tracker = checkpoints / "tracker"
    return int(tracker.read_text()) if tracker.exists() else 0


def keep_saving(controller, drafter, checkpoints):
    """Step after step as verl's `_save_checkpoint` goes: the policy, then the tracker, which is replaced at once."""
    parameters = trainable_parameters(drafter)

    def save(directory, provenance, beside, keeps):
        step = provenance.policy_step
        whole = {name: torch.full_like(p, step) for name, p in parameters.items()}
        state = {"parameters": whole, "moments": [t + 0.5 for t in whole.values()], "steps": step}
        save_drafter(drafter, directory, asdict(provenance), training_state=state, tensors=whole)

    def save_policy(directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model").write_text(directory.parent.name)

    controller.spot.save, policy = save, SimpleNamespace(save_checkpoint=save_policy)
    for step in itertools.count(named(checkpoints) + 1):
        with followed(policy, "save_checkpoint", functools.partial(controller.save, step)):
            policy.save_checkpoint(checkpoints / f"global_step_{step}" / POLICY)
            (checkpoints / "tracker.new").write_text(str(step))
            os.replace(checkpoints / "tracker.new", checkpoints / "tracker")
        controller.saved(step)


def test_whatever_moment_it_is_killed_at(run, drafter, tmp_path):
    controller = run()
    checkpoints, rng, steps = tmp_path / "ckpt", random.Random(0), []
    for _ in range(KILLS):
        process = multiprocessing.get_context("fork").Process(
            target=keep_saving, args=(controller, drafter, checkpoints), daemon=True
        )
        process.start()
        before, deadline = named(checkpoints), time.monotonic() + 60
        while named(checkpoints) == before and time.monotonic() < deadline:
            process.join(0.001)
        process.join(rng.uniform(0.0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        step = named(checkpoints)
        steps.append(step)
        directory = checkpoints / f"global_step_{step}"
        assert saved_drafter(directory) == directory / CHECKPOINT
        assert (directory / POLICY / "model").read_text() == directory.name
        assert json.loads((directory / CHECKPOINT / "provenance.json").read_text())["policy_step"] == step
        state = load_training_state(directory / CHECKPOINT)
        assert state["steps"] == step
        for tensors, value in (
            (load_file(directory / CHECKPOINT / "model.safetensors").values(), step),
            (state["parameters"].values(), step),
            (state["moments"], step + 0.5),
        ):
            assert all(bool((t == value).all()) for t in tensors)
    assert steps == sorted(set(steps)), "each resumption got further"
