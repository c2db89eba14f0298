"""Drafters beside verl's checkpoints: complete before verl names the step, found again, and gone when the policy is."""

import os
import time
from types import SimpleNamespace

import pytest

from verl_tlt.files.disk import remove_model
from verl_tlt.trainer.checkpoints import CHECKPOINT, POLICY, followed, saved_drafter, tidy
from verl_tlt.trainer.waits import CallFailed


@pytest.fixture
def checkpoints(tmp_path):
    """Five steps with a drafter, the first three without their policies, and two in which it is not whole."""
    for step in range(1, 8):
        drafter = tmp_path / f"global_step_{step}" / CHECKPOINT
        drafter.mkdir(parents=True)
        (drafter / "model.safetensors").write_text(str(step))
        if step <= 5:
            (drafter / "config.json").touch()  # the last file to be written
        if step > 3:
            (drafter.parent / POLICY).mkdir()
    (tmp_path / "global_step_latest" / CHECKPOINT).mkdir(parents=True)
    return tmp_path


def drafters(checkpoints):
    return sorted(int(path.parent.name.rpartition("_")[2]) for path in checkpoints.glob(f"*[0-9]/{CHECKPOINT}"))


@pytest.mark.parametrize(("asked", "found"), [(4, 4), (5, 5), (6, 5), (7, 5)])
def test_a_resumed_run_takes_its_steps_drafter_or_the_newest_before_it(checkpoints, said, asked, found):
    directory = saved_drafter(checkpoints / f"global_step_{asked}")
    assert directory == checkpoints / f"global_step_{found}" / CHECKPOINT
    assert bool(said.records) == (asked != found)


def test_without_the_drafters_up_to_its_step_a_resumed_run_starts_with_its_own(checkpoints, said):
    saved_drafter(checkpoints / "global_step_6")
    assert "tlt.drafter.path" in said.text and "up to global_step_6" in said.text
    for step in range(1, 7):
        remove_model(checkpoints / f"global_step_{step}" / CHECKPOINT)
    assert saved_drafter(checkpoints / "global_step_6") is None


def test_nothing_to_resume_from(checkpoints):
    assert saved_drafter(None) is None
    assert saved_drafter(checkpoints / "global_step_8" / "none" / "global_step_1") is None
    assert saved_drafter(checkpoints / "global_step_0") is None


def test_drafters_go_with_their_policies(checkpoints):
    drafter = checkpoints / "global_step_1" / CHECKPOINT
    drafter.rename(drafter.with_name(f".{CHECKPOINT}.old-0123"))  # a run that was killed while it removed this one
    tidy(checkpoints / "global_step_5", prunes=True)
    assert drafters(checkpoints) == [4, 5, 6, 7]
    assert not list(checkpoints.glob(f"*/.{CHECKPOINT}*")), "nothing is left under another name"


def test_the_newest_drafter_stays_until_a_later_step_has_one(checkpoints):
    for step in (4, 5):
        remove_model(checkpoints / f"global_step_{step}" / CHECKPOINT)  # its save failed
    tidy(checkpoints / "global_step_5", prunes=True)
    assert drafters(checkpoints) == [3, 6, 7]
    assert saved_drafter(checkpoints / "global_step_5") == checkpoints / "global_step_3" / CHECKPOINT
    (checkpoints / "global_step_6" / CHECKPOINT / "config.json").touch()
    (checkpoints / "global_step_5" / POLICY).rmdir()
    tidy(checkpoints / "global_step_6", prunes=True)
    assert drafters(checkpoints) == [6, 7], "also where steps between them have none"


def test_steps_before_one_that_was_seen_to_are_not_looked_at_again(checkpoints, monkeypatch):
    looked = []
    listdir = os.listdir
    monkeypatch.setattr("os.listdir", lambda path: looked.append(path.name) or listdir(path))
    for seen in ([5, 4, 3, 2, 1], [5, 4, 3]):
        tidy(checkpoints / "global_step_5", prunes=True)
        assert looked == [f"global_step_{step}" for step in seen]
        looked.clear()


@pytest.mark.parametrize(("step", "prunes"), [(5, False), (3, True)])
def test_where_verl_keeps_every_policy_or_on_another_disk_only_what_a_killed_save_left_goes(checkpoints, step, prunes):
    left = checkpoints / f"global_step_{step}" / f".{CHECKPOINT}.new-0123"
    left.mkdir()
    tidy(checkpoints / f"global_step_{step}", prunes)
    assert not left.exists() and drafters(checkpoints) == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_prunes_when_its_checkpoint_is_complete(run, checkpoints, tmp_path):
    (tmp_path / "ckpt").symlink_to(checkpoints)
    controller = run(facts={"prunes": True})
    controller.save(5)
    assert drafters(checkpoints) == [1, 2, 3, 4, 5, 6, 7], "verl has not named the step"
    controller.saved(5)
    assert drafters(checkpoints) == [4, 5, 6, 7] and controller.guard.counts.total() == 0


def test_a_disk_of_the_spot_trainers_node_alone_is_tidied_too(run, checkpoints, tmp_path):
    controller = run(facts={"prunes": True, "checkpoints": tmp_path / "disk of this node"})
    controller.spot.on_its_node = lambda function, step, *rest: function(checkpoints / step.name, *rest)
    left = checkpoints / "global_step_5" / f".{CHECKPOINT}.new-0123"
    left.mkdir()
    controller.spot.broken["save"] = CallFailed("it was killed", died=True)
    controller.save(5)
    assert not left.exists() and drafters(checkpoints) == [1, 2, 3, 4, 5, 6, 7]
    controller.saved(5)
    assert drafters(checkpoints) == [4, 5, 6, 7] and controller.guard.counts == {"save": 1}


def test_the_drafter_is_written_after_the_policy_and_before_verl_names_the_step(run):
    controller, order = run(), []
    controller.spot.save = lambda *args: (time.sleep(0.2), order.append("drafter"))
    policy = SimpleNamespace(save_checkpoint=lambda path: order.append(f"policy in {path}") or 7)
    original = policy.save_checkpoint
    with pytest.raises(OSError, match="disk"), followed(policy, "save_checkpoint", lambda: controller.save(1)):
        assert policy.save_checkpoint("actor") == 7
        order.append("named")
        raise OSError("disk full")
    assert order == ["policy in actor", "drafter", "named"]
    assert policy.save_checkpoint is original
