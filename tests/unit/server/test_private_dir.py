"""A directory that a process has of its own until it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_tlt.files.disk import _HELD, private_dir

OTHER = """
import sys, tempfile
from verl_tlt.files.disk import private_dir
tempfile.tempdir = sys.argv[1]
print(private_dir("shape"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(tmp):
    """(a function that kills another process, that process's directory)"""
    command = [sys.executable, "-c", OTHER, str(tmp)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def kill():
            process.kill()
            process.wait()

        yield kill, Path(process.stdout.readline().strip())
        kill()


def test_the_path_of_a_killed_process_is_emptied_and_used_again(tmp, other):
    """vLLM compiles anew for each path of a drafter."""
    kill, theirs = other
    (theirs / "drafter").mkdir()
    ours = private_dir("shape")
    assert ours != theirs and ours.parent == theirs.parent and ours.stat().st_mode & 0o777 == 0o700
    assert (theirs / "drafter").exists() and private_dir("other").name == "other-0"
    kill()
    assert private_dir("shape") == theirs and not [*theirs.iterdir()]


def test_what_a_killed_process_left_is_removed_by_one_with_another_name(tmp, other):
    kill, theirs = other
    (theirs.parent / "notes").mkdir()
    kill()
    private_dir("other")
    assert not theirs.exists() and (theirs.parent / "notes").exists()


def test_where_files_cannot_be_locked_each_gets_a_new_directory(tmp, monkeypatch):
    def refused(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refused)
    first, second = private_dir("shape"), private_dir("shape")
    assert first != second and first.exists() and second.exists()


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """Give this machine another host name, another boot id, or both."""

    def move(host=None, boot=None):
        if host:
            monkeypatch.setattr("socket.gethostname", lambda: host)
        if boot:
            (tmp_path / "boot_id").write_text(f"{boot}\n")
            monkeypatch.setattr("verl_tlt.files.disk.BOOT_ID", tmp_path / "boot_id")

    return move


def test_machines_that_share_the_folder_do_not_take_from_each_other(other, moved):
    """Their locks may not be shared."""
    kill, theirs = other
    moved("another", "another-boot")
    ours = private_dir("shape")
    kill()
    assert private_dir("shape") not in (ours, theirs) and theirs.exists()


def test_a_container_that_starts_again_and_a_machine_after_a_reboot_take_their_path_again(other, moved):
    kill, theirs = other
    moved("new-container")
    assert private_dir("shape") != theirs, "the other one lives"
    kill()
    for name, there in (("shape", theirs), ("other", theirs.with_name("other-0"))):
        assert private_dir(name) == there  # by its boot id
        _HELD.pop().close()
    moved(boot="next-boot")
    assert private_dir("shape") == theirs  # by the host name that it got then
    _HELD.pop().close()
    moved(host="newer-container")
    assert private_dir("shape") == theirs


def test_without_a_boot_id_the_host_name_counts(other, monkeypatch, tmp_path):
    kill, theirs = other
    monkeypatch.setattr("verl_tlt.files.disk.BOOT_ID", tmp_path / "absent")
    kill()
    assert private_dir("shape") == theirs
