"""Drafters beside verl's checkpoints: complete before verl names the step, and gone when the policy is."""

import threading
from types import SimpleNamespace

import pytest

from verl_tlt.trainer.checkpoints import CHECKPOINT, POLICY, followed, saved_drafter, tidy


@pytest.fixture
def checkpoints(tmp_path):
    """Five steps with a drafter; verl has removed the policies of the first three."""
    for step in range(1, 6):
        drafter = tmp_path / f"global_step_{step}" / CHECKPOINT
        drafter.mkdir(parents=True)
        (drafter / "model.safetensors").write_text(str(step))
        if step > 3:
            (drafter.parent / POLICY).mkdir()
    return tmp_path


def drafters(checkpoints):
    return sorted(int(path.parent.name.rpartition("_")[2]) for path in checkpoints.glob(f"*/{CHECKPOINT}"))


def test_drafters_go_with_their_policies(checkpoints):
    drafter = checkpoints / "global_step_1" / CHECKPOINT
    drafter.rename(drafter.with_name(f".{CHECKPOINT}.old-0123"))  # a run that was killed while it removed this one
    tidy(checkpoints / "global_step_5", prunes=True)
    assert drafters(checkpoints) == [4, 5]
    assert not list(checkpoints.glob(f"*/.{CHECKPOINT}*")), "nothing is left under another name"
    assert saved_drafter(checkpoints / "global_step_3") is None


@pytest.mark.parametrize(("step", "prunes"), [(5, False), (3, True)])
def test_where_verl_keeps_every_policy_or_on_another_disk_no_drafter_is_touched(checkpoints, step, prunes):
    tidy(checkpoints / f"global_step_{step}", prunes)
    assert drafters(checkpoints) == [1, 2, 3, 4, 5]


def test_what_a_killed_save_left_goes_with_the_next_one(checkpoints):
    left = checkpoints / "global_step_5" / f".{CHECKPOINT}.new-0123"
    left.mkdir()
    tidy(checkpoints / "global_step_5", prunes=False)
    assert not left.exists() and drafters(checkpoints) == [1, 2, 3, 4, 5]


def test_a_run_prunes_when_its_checkpoint_is_complete(run, checkpoints, tmp_path):
    (tmp_path / "ckpt").symlink_to(checkpoints)
    controller = run(facts={"prunes": True})
    controller.save(5)
    assert drafters(checkpoints) == [1, 2, 3, 4, 5], "verl has not named the step"
    controller.saved(5)
    assert drafters(checkpoints) == [4, 5] and controller.guard.counts.total() == 0


def test_verl_names_the_step_only_after_the_drafter_is_written_and_that_after_the_policy(run):
    controller = run()
    written, begun, order = threading.Event(), threading.Event(), []
    controller.spot.save = lambda *args: (order.append("drafter"), begun.set(), written.wait(30))
    policy = SimpleNamespace(save_checkpoint=lambda path: order.append(f"policy in {path}"))

    def verl():
        with followed(policy, "save_checkpoint", lambda: controller.save(1)):
            policy.save_checkpoint("actor")
            order.append("named")

    saving = threading.Thread(target=verl)
    saving.start()
    assert begun.wait(30)
    saving.join(0.2)
    assert order == ["policy in actor", "drafter"]
    written.set()
    saving.join(30)
    assert order == ["policy in actor", "drafter", "named"]


def test_a_followed_method_is_itself_again_however_it_ended():
    policy = SimpleNamespace(save_checkpoint=lambda: 7)
    original, called = policy.save_checkpoint, []
    with pytest.raises(OSError, match="disk"), followed(policy, "save_checkpoint", lambda: called.append(1)):
        assert policy.save_checkpoint() == 7 and called == [1]
        raise OSError("disk full")
    assert policy.save_checkpoint is original
