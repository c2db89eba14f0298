"""Checkpoints on a disk that is too small for the drafter and the policy's next checkpoint."""

import shutil

import pytest
from tiny_trainer import FACTS, make_trainer, session

from verl_tlt.errors import DrafterError
from verl_tlt.spot_trainer import trainer as module

PAGE = 4096
POLICY_BYTES, SHORT = 64 * PAGE, 32 * PAGE


@pytest.fixture
def trainer(tmp_path):
    trainer = make_trainer(tmp_path / "policy", 24)
    session(trainer)
    return trainer


@pytest.fixture
def drafter_bytes(trainer, tmp_path):
    trainer.save(str(tmp_path / "sized"), FACTS)
    return sum(file.stat().st_size for file in (tmp_path / "sized").rglob("*.safetensors"))


def policys(disk, step):
    """verl's part of a checkpoint."""
    folder = disk / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "model.pt").write_bytes(bytes(POLICY_BYTES))
    return folder


def save(trainer, folder, keeps=0):
    """The drafter's part."""
    trainer.save(str(folder / "tlt_drafter"), FACTS, str(folder), keeps)


def held(folder):
    return {path.name for path in folder.iterdir()}


def test_a_drafter_is_written_where_the_policys_next_checkpoint_has_room_too(
    trainer, drafter_bytes, tmp_path, monkeypatch
):
    policys(tmp_path, 1)
    newest = policys(tmp_path, 2)
    for keeps, left in ((0, POLICY_BYTES), (3, POLICY_BYTES), (2, 0)):  # two policies: verl removes one before
        monkeypatch.setattr(module, "free_bytes", lambda _, left=left: drafter_bytes + left - SHORT)
        with pytest.raises(DrafterError, match="global_step_2 gets no drafter"):
            save(trainer, newest, keeps)
        assert held(newest) == {"actor"}
        monkeypatch.setattr(module, "free_bytes", lambda _, left=left: drafter_bytes + left)
        save(trainer, newest, keeps)
        assert held(newest) == {"actor", "tlt_drafter"}
        shutil.rmtree(newest / "tlt_drafter")


def test_a_place_that_is_a_link_stays_one(trainer, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "elsewhere" / "drafter")  # also before there is anything
    for _ in range(2):
        trainer.save(str(tmp_path / "latest"), FACTS)
        assert (tmp_path / "latest").is_symlink() and held(tmp_path / "elsewhere") == {"drafter"}
        assert (tmp_path / "elsewhere" / "drafter" / "config.json").is_file()
