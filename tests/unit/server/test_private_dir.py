"""What jobs and servers have of their own: directories, swept once their process is gone, and the store of drafters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_tlt.files.disk import linked_as, make_private_dir

OWNER = """
import sys, tempfile
from verl_tlt.files.disk import make_private_dir
tempfile.tempdir = sys.argv[1]
print(make_private_dir("tlt-"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(tmp):
    """(a process that owns a directory, the directory)"""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process, tmp / process.stdout.readline().strip().rpartition("/")[2]
    process.kill()
    process.wait()


def test_each_process_has_its_own_until_it_is_killed_and_what_is_not_ours_stays(tmp, other):
    process, theirs = other
    ours = make_private_dir("tlt-")
    assert set(tmp.iterdir()) == {ours, theirs} and ours.stat().st_mode & 0o777 == 0o700
    (theirs / "drafter").mkdir()
    (tmp / "tlt-notes").mkdir()
    process.kill()
    process.wait()
    another = make_private_dir("tlt-")
    assert set(tmp.iterdir()) == {ours, another, tmp / "tlt-notes"}


def test_where_files_cannot_be_locked_a_directory_is_made_and_none_is_removed(tmp, monkeypatch):
    def refused(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refused)
    assert {make_private_dir("tlt-"), make_private_dir("tlt-")} == {*tmp.iterdir()} and len([*tmp.iterdir()]) == 2


LINKED = """
import pathlib, sys, tempfile
from verl_tlt.files.disk import linked_as
tempfile.tempdir = sys.argv[1]
print(linked_as(pathlib.Path("theirs"), "shape"), flush=True)
sys.stdin.read()
"""


def test_a_link_has_a_path_that_the_next_process_has_again(tmp):
    """vLLM compiles anew for each path of a drafter."""
    command = [sys.executable, "-c", LINKED, str(tmp)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        theirs = Path(process.stdout.readline().strip())
        ours = linked_as(tmp / "ours", "shape")
        assert ours != theirs and ours.readlink() == tmp / "ours" and theirs.readlink() == Path("theirs")
        assert linked_as(tmp / "ours", "other").name.startswith("other") and ours.parent.stat().st_mode & 0o777 == 0o700
        process.kill()
    assert linked_as(tmp / "next", "shape") == theirs and theirs.readlink() == tmp / "next"


def test_a_link_of_somebody_else_is_not_followed(tmp):
    linked_as(tmp / "drafter", "shape").parent.rename(tmp / "elsewhere")
    (tmp / f"verl-tlt-links-{os.getuid()}").symlink_to(tmp / "elsewhere")
    assert linked_as(tmp / "drafter", "shape") == tmp / "drafter"
