"""Nothing that a run owns outlives it: real segments, semaphores, sockets and folders of killed processes."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from interrupted import interruptible_run

from verl_tlt.commands.processes import LONGEST_BASE, ProcessTree

SHM = Path("/dev/shm")
EVERYTHING = 10
"""Three segments, a socket and a note of the owner, and as many of its daemon."""
OWNER = """
import multiprocessing, os, socket, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None  # as where the tracker is killed with everybody else
name = sys.argv[1]
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    name += "-daemon"
kept = [shared_memory.SharedMemory(f"{sys.argv[1]}-old")] if os.path.exists(f"/dev/shm/{sys.argv[1]}-old") else []
for i in range(3):
    kept.append(shared_memory.SharedMemory(f"{name}-{i}", create=True, size=4096))
    time.sleep(0.15)
kept.append(multiprocessing.get_context("spawn").Semaphore())
kept.append(server := socket.socket(socket.AF_UNIX))
server.bind(f"/tmp/{name}.sock")
tempfile.mkdtemp()
open(f"/tmp/{name}.semaphore", "w").write(kept[-2]._semlock.name)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path):
    """A script that leaves everything behind when it is killed, and the beginning of the names it uses."""
    script, name = tmp_path / "owner.py", f"tlt-test-{uuid.uuid4().hex[:8]}"
    script.write_text(OWNER)
    yield [sys.executable, str(script), name], name
    for path in existing(name):
        path.unlink()


@pytest.fixture
def base(monkeypatch):
    """An empty temporary folder with a short name, for this test's runs alone."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def existing(name):
    return {*SHM.glob(f"{name}*"), *Path("/tmp").glob(f"{name}*")}


def segment(name):
    return shared_memory.SharedMemory(name, create=True, size=4096)


def semaphores(name):
    """The semaphores that the owner and its daemon have made, once both have made everything."""
    notes = [Path(f"/tmp/{name}{suffix}.semaphore") for suffix in ("", "-daemon")]
    deadline = time.monotonic() + 20
    while not all(note.exists() and note.read_text() for note in notes):
        assert time.monotonic() < deadline, "the owner did not come up"
        time.sleep(0.02)
    found = [SHM / f"sem.{note.read_text().removeprefix('/')}" for note in notes]
    for note in notes:
        note.unlink()
    return found


def test_what_killed_processes_own_is_removed_and_nothing_else(owner, base, tmp_path):
    argv, name = owner
    before = segment(f"{name}-mine-before")
    tree = ProcessTree(argv, env=os.environ, log=tmp_path / "log")
    during = segment(f"{name}-mine-during")
    try:
        made = semaphores(name)
        assert all(path.exists() for path in made)
        assert len(existing(name)) == EVERYTHING and len(list(base.glob("*/*"))) == 2
        assert tree.stop() == []
        assert {path.name for path in existing(name)} == {before.name, during.name}
        assert not any(path.exists() for path in made) and list(base.iterdir()) == []
    finally:
        for mine in (before, during):
            mine.close()
            mine.unlink()


def test_what_others_share_with_the_run_and_what_cannot_be_removed_stays(owner, base, tmp_path):
    argv, name = owner
    old = segment(f"{name}-old")
    old.close()  # nobody has it open, but the run will have
    time.sleep(1.1)
    tree = ProcessTree(argv, env=os.environ, log=tmp_path / "log")
    semaphores(name)
    shared, stays = shared_memory.SharedMemory(f"{name}-0"), SHM / f"{name}-1"
    stays.unlink()
    stays.mkdir()
    try:
        assert tree.stop() == [] and list(base.iterdir()) == []
        assert {path.name for path in existing(name)} == {shared.name, old.name, stays.name}
    finally:
        stays.rmdir()
    shared.close()
    for left in (shared, old):
        left.unlink()


@pytest.mark.parametrize("made", [0, 1, 4, EVERYTHING])
def test_an_interrupted_run_leaves_nothing_whenever_it_comes(owner, base, tmp_path, made):
    argv, name = owner
    recipe, started = tmp_path / "recipe.sh", tmp_path / "started"
    recipe.write_text("exec " + " ".join(argv))
    program = interruptible_run(recipe, tmp_path / "out", f"Path({str(started)!r}).touch()")
    demo = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, start_new_session=True)
    while not started.exists() or len(existing(name)) < made:
        assert demo.poll() is None
        time.sleep(0.005)
    demo.send_signal(signal.SIGTERM)
    _, errors = demo.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    for suffix in ("", "-daemon"):
        Path(f"/tmp/{name}{suffix}.semaphore").unlink(missing_ok=True)
    assert existing(name) == set() and list(base.iterdir()) == []


def test_a_command_that_cannot_start_leaves_nothing(base, tmp_path):
    with pytest.raises(FileNotFoundError):
        ProcessTree(["true"], env=os.environ, log=tmp_path / "log", cwd=tmp_path / "nowhere")
    assert list(base.iterdir()) == []


def test_a_long_temporary_folder_is_not_used(base, tmp_path, monkeypatch):
    """Ray's sockets in it would have names that Linux refuses."""
    long = tmp_path / ("x" * LONGEST_BASE)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    tree = ProcessTree(["sh", "-c", "echo $TMPDIR"], env=os.environ, log=tmp_path / "log")
    tree.process.wait(timeout=20)
    folder = Path((tmp_path / "log").read_text().strip())
    assert folder.parent == Path("/tmp") and folder.is_dir()
    assert tree.stop() == [] and not folder.exists()
