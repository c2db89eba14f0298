"""Checkpoints on a real file system that is too small: the policy is whole, and the drafter is there or it is not."""

import shutil
import subprocess

import pytest
from tiny_trainer import FACTS, make_trainer, session

from verl_tlt.errors import DrafterError

PAGE = 4096
POLICY_BYTES = 64 * PAGE


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of so many bytes."""
    mounted = []

    def mount(size):
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True)
        if done.returncode:
            pytest.skip("a file system of a limited size cannot be mounted here: mount needs root and its permission")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def trainer(tmp_path):
    trainer = make_trainer(tmp_path / "policy", 24)
    session(trainer)
    return trainer


@pytest.fixture
def drafter_bytes(trainer, tmp_path):
    trainer.save(str(tmp_path / "sized"), FACTS)
    return sum(file.stat().st_size for file in (tmp_path / "sized").rglob("*.safetensors"))


def policys(disk, step, size=POLICY_BYTES):
    """verl's part of a checkpoint."""
    folder = disk / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "model.pt").write_bytes(bytes(size))
    return folder


def save(trainer, folder, keeps=0):
    """The drafter's part."""
    trainer.save(str(folder / "tlt_drafter"), FACTS, str(folder), keeps)


def held(folder):
    return {path.name for path in folder.iterdir()}


def test_where_both_fit_both_are_written(trainer, drafter_bytes, disk):
    large = disk(2 * POLICY_BYTES + 2 * drafter_bytes + 64 * PAGE)
    folder = policys(large, 1)
    save(trainer, folder)
    assert held(folder) == {"actor", "tlt_drafter"}
    policys(large, 2)


def test_a_policy_that_verl_removes_before_it_writes_the_next_one_makes_room_for_it(trainer, drafter_bytes, disk):
    small = disk(2 * POLICY_BYTES + drafter_bytes + 32 * PAGE)
    oldest, newest = policys(small, 1), policys(small, 2)
    with pytest.raises(DrafterError, match="global_step_2 gets no drafter"):
        save(trainer, newest)
    save(trainer, newest, keeps=2)
    shutil.rmtree(oldest / "actor")
    policys(small, 3)
    assert held(newest) == {"actor", "tlt_drafter"}


def test_a_place_that_is_a_link_stays_one(trainer, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "elsewhere" / "drafter")  # also before there is anything
    for _ in range(2):
        trainer.save(str(tmp_path / "latest"), FACTS)
        assert (tmp_path / "latest").is_symlink() and held(tmp_path / "elsewhere") == {"drafter"}
        assert (tmp_path / "elsewhere" / "drafter" / "config.json").is_file()
