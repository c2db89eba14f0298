"""Checkpoints of a spot trainer: where they are written, and that one which goes on from them holds what was saved.

That is candidate, moments, steps, and both of the gate's references; also what the release before wrote
(`recorded_checkpoint`, files that no test writes).
"""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_trainer import (
    FACTS,
    VERSIONS,
    first_of,
    make_trainer,
    publish,
    same,
    session,
    texts,
    verifier_arrays,
)

from verl_tlt.drafter import load_training_state
from verl_tlt.drafter.checkpoint import STATE, provenance, write_state
from verl_tlt.errors import DrafterError
from verl_tlt.spot_trainer import trainer as module
from verl_tlt.trainer.checkpoints import saved_drafter

RECORDED = Path(__file__).parent / "recorded_checkpoint"


@pytest.fixture
def trainer(tmp_path):
    """It has published once and is ahead of that."""
    trainer = make_trainer(tmp_path / "policy", 60)
    publish(trainer)
    session(trainer)
    assert not same(trainer.candidate, trainer.served) and not same(trainer.served, trainer.initial)
    return trainer


@pytest.fixture
def step(tmp_path):
    return tmp_path / "global_step_3"


def moments(trainer):
    """Adam's moments and step counts, by parameter."""
    state = trainer.trainer.optimizer.state.values()
    return [{key: value.clone() for key, value in one.items()} for one in state]


def assert_same_moments(left, right):
    for one, other in zip(moments(left), moments(right), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_it_goes_on_with_everything_the_gate_and_the_optimizer_knew(trainer, tmp_path, step):
    trainer.save(str(step / "tlt_drafter"), FACTS)
    other = make_trainer(tmp_path / "policy", resume_from=step)
    for which in VERSIONS:
        assert same(getattr(trainer, which), getattr(other, which)), which
    assert_same_moments(trainer, other)
    assert (other.trainer.steps, other.version) == (trainer.trainer.steps, 1)
    other.add(2, texts(60), verifier_arrays())
    assert session(other).verdict is not None, "a candidate that is ahead is judged in the first session"


def test_one_that_never_published_has_one_reference(tmp_path, step):
    trainer = make_trainer(tmp_path / "policy", 3)
    trainer.save(str(step / "tlt_drafter"), FACTS)
    other = make_trainer(tmp_path / "policy", 60, resume_from=step)
    assert all(same(getattr(other, which), trainer.served) for which in VERSIONS)
    assert session(other).verdict is None, "it is the served one"


def test_a_training_state_that_does_not_fit_costs_the_moments_and_not_the_run(trainer, tmp_path, step):
    directory = step / "tlt_drafter"
    trainer.save(str(directory), FACTS)
    state = load_training_state(directory)
    name = next(iter(state["initial"]))
    write_state(state | {"initial": {**state["initial"], name: torch.ones(1)}}, directory / STATE)
    other = make_trainer(tmp_path / "policy", 60, resume_from=step)
    assert same(other.served, trainer.served) and same(other.candidate, trainer.served)
    assert other.trainer.steps == 0 and session(other).steps > 0


def test_the_release_befores_checkpoint_goes_on_with_every_version_and_the_optimizer(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "run")
    policy, step = tmp_path / "run" / "policy", tmp_path / "run" / "global_step_3"
    start, directory = first_of(policy, resume_from=step), saved_drafter(step)
    assert (start.served.version, start.served.acceptance) == (1, (0.5, 0.4, 0.3))
    assert start.tokens_trained == 1234 and start.aux_layers == (1, 2, 3) and str(directory) in start.origin
    trainer = make_trainer(policy, resume_from=step)
    state = load_training_state(directory)
    average = state.get("average", state["parameters"])  # it was saved before there was one
    saved = load_file(directory / "model.safetensors")
    assert (trainer.trainer.steps, trainer.version) == (22, 1)
    assert all(torch.equal(value, saved[name]) for name, value in trainer.served.items())
    assert all(torch.equal(value, average[name]) for name, value in trainer.candidate.items())
    assert all(torch.equal(value, state["initial"][name]) for name, value in trainer.initial.items())
    for index, held in enumerate(moments(trainer)):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(held[key], state["optimizer"]["state"][str(index)][key])
    trainer.add(4, texts(20), verifier_arrays())
    result = session(trainer)
    assert result.steps > 0 and result.skipped == 0 and math.isfinite(result.loss)
    assert trainer.trainer.steps == 22 + result.steps


def test_one_that_replaces_another_goes_on_from_what_was_published_with_the_checkpoints_moments(tmp_path, step):
    trainer = make_trainer(tmp_path / "policy", 60)
    session(trainer)
    trainer.save(str(step / "tlt_drafter"), FACTS)
    saved = moments(trainer)
    published = publish(trainer)
    new = make_trainer(tmp_path / "policy", published=published, checkpoint=str(step / "tlt_drafter"))
    assert new.version == published.version == 1
    for name, value in new.served.items():
        assert torch.equal(value, trainer.served[name].bfloat16().float()), name
    assert same(new.candidate, new.served) and same(new.trainer.cloned_parameters(), new.served)
    assert same(new.initial, trainer.initial)
    for one, other in zip(saved, moments(new), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    new.save(str(tmp_path / "again"), replace(FACTS, version=0))
    assert provenance(tmp_path / "again")["version"] == 1, "also where the RL trainer could not hand it out yet"
    new.add(2, texts(60), verifier_arrays())
    assert session(new).steps > 0


def test_a_drafter_is_written_where_the_policys_next_checkpoint_has_room_too(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path / "policy")
    trainer.save(str(tmp_path / "sized"), FACTS)
    drafter_bytes = sum(file.stat().st_size for file in (tmp_path / "sized").rglob("*.safetensors"))
    policy_bytes = 1 << 18
    newest = tmp_path / "global_step_2"
    (newest / "actor").mkdir(parents=True)
    (newest / "actor" / "model.pt").write_bytes(bytes(policy_bytes))  # verl's part of a checkpoint
    for rotates, left in ((False, policy_bytes), (True, 0)):
        monkeypatch.setattr(module, "free_bytes", lambda _, left=left: drafter_bytes + left - policy_bytes // 2)
        with pytest.raises(DrafterError, match="global_step_2 gets no drafter"):
            trainer.save(str(newest / "tlt_drafter"), FACTS, str(newest), rotates)
        assert [path.name for path in newest.iterdir()] == ["actor"]
        monkeypatch.setattr(module, "free_bytes", lambda _, left=left: drafter_bytes + left)
        trainer.save(str(newest / "tlt_drafter"), FACTS, str(newest), rotates)
        shutil.rmtree(newest / "tlt_drafter")


def test_a_policy_that_verl_still_writes_keeps_its_room(tmp_path, monkeypatch):
    for step, policy in ((2, 900), (9, 100), (10, 30)):  # of the last one, 30 bytes are there
        (actor := tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
        (actor / "model.pt").write_bytes(bytes(policy))
    (drafter := tmp_path / "global_step_9" / "tlt_drafter").mkdir()
    (drafter / "model.safetensors").write_bytes(bytes(5000))
    for rotates, coming in ((False, 70 + 100), (True, 70)):
        monkeypatch.setattr(module, "free_bytes", lambda _, coming=coming: 50 + coming)
        module.check_room(tmp_path / "global_step_10", 50, rotates)
        with pytest.raises(DrafterError, match="gets no drafter"):
            module.check_room(tmp_path / "global_step_10", 51, rotates)


def test_where_free_bytes_are_unknown_no_file_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda _: None)
    monkeypatch.setattr("os.scandir", lambda _: pytest.fail("a folder was read"))
    module.check_room(tmp_path, 1, rotates=False)


def test_a_place_that_is_a_link_stays_one(tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (tmp_path / "latest").symlink_to(elsewhere / "drafter")  # also before there is anything
    trainer = make_trainer(tmp_path / "policy")
    for _ in range(2):
        trainer.save(str(tmp_path / "latest"), FACTS)
        assert (tmp_path / "latest").is_symlink() and [path.name for path in elsewhere.iterdir()] == ["drafter"]
        assert (elsewhere / "drafter" / "config.json").is_file()
