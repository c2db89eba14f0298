"""What jobs and servers have of their own: directories and links, which are free once their process is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_tlt.files.disk import linked_as, make_private_dir

MADE = """
import sys, tempfile
from verl_tlt.files.disk import linked_as, make_private_dir
tempfile.tempdir = sys.argv[1]
print(make_private_dir("tlt-") if sys.argv[2] == "folder" else linked_as("theirs", "shape"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(tmp):
    """Starts a process that has a `folder` or a `link` of its own; (a function that kills it, the path)"""
    processes = []

    def kill():
        processes[0].kill()
        processes[0].wait()

    def start(what):
        command = [sys.executable, "-c", MADE, str(tmp), what]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return kill, Path(processes[0].stdout.readline().strip())

    yield start
    kill()


def test_each_process_has_its_own_until_it_is_killed_and_what_is_not_ours_stays(tmp, other):
    kill, theirs = other("folder")
    ours = make_private_dir("tlt-")
    assert set(tmp.iterdir()) == {ours, theirs} and ours.stat().st_mode & 0o777 == 0o700
    (theirs / "drafter").mkdir()
    (tmp / "tlt-notes").mkdir()
    kill()
    another = make_private_dir("tlt-")
    assert set(tmp.iterdir()) == {ours, another, tmp / "tlt-notes"}


def test_where_files_cannot_be_locked_a_directory_is_made_and_none_is_removed(tmp, monkeypatch):
    def refused(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refused)
    assert {make_private_dir("tlt-"), make_private_dir("tlt-")} == {*tmp.iterdir()} and len([*tmp.iterdir()]) == 2


def test_a_link_has_a_path_that_the_next_process_has_again(tmp, other):
    """vLLM compiles anew for each path of a drafter."""
    kill, theirs = other("link")
    ours = linked_as(tmp / "ours", "shape")
    assert ours != theirs and ours.readlink() == tmp / "ours" and theirs.readlink() == Path("theirs")
    assert linked_as(tmp / "ours", "other").name.startswith("other") and ours.parent.stat().st_mode & 0o777 == 0o700
    kill()
    assert linked_as(tmp / "next", "shape") == theirs and theirs.readlink() == tmp / "next"


def test_a_link_of_somebody_else_is_not_followed(tmp):
    linked_as(tmp / "drafter", "shape").parent.rename(tmp / "elsewhere")
    (tmp / f"verl-tlt-links-{os.getuid()}").symlink_to(tmp / "elsewhere")
    assert linked_as(tmp / "drafter", "shape") == tmp / "drafter"
