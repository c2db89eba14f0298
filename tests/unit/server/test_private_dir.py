"""A directory that a process has of its own until it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_tlt.files.disk import private_dir

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


def test_machines_that_share_the_folder_do_not_take_from_each_other(tmp, other, monkeypatch):
    """Their locks may not be shared."""
    kill, theirs = other
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    ours = private_dir("shape")
    kill()
    assert private_dir("shape") not in (ours, theirs) and theirs.exists()
