"""Nothing outlives a stopped tree: real processes that detach themselves in the ways Ray and vLLM do."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from interrupted import interruptible_run

from verl_tlt.commands import processes
from verl_tlt.commands.processes import ProcessTree, interruptible

FAMILY = """
import os, signal, subprocess, sys, time
note = lambda name: open(sys.argv[1] + "/" + name, "w").write(str(os.getpid()))

def child(name, new_session, stubborn=False, then=lambda: None):
    if os.fork():
        return
    if new_session:
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else signal.SIG_DFL)
    then()
    note(name)
    time.sleep(600)

note("root")
child("session", True)
child("stubborn", True, stubborn=True)
if os.fork() == 0:  # a daemon: its parent is gone at once, and so is its environment
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve(sys.executable, [sys.executable, "-c",
        "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)",
        sys.argv[1] + "/daemon"], {})
child("nested", True, then=lambda: child("grandchild", True))
"""
NAMES = ("root", "session", "stubborn", "daemon", "nested", "grandchild")


REST_S = 0.5
"""What descendants get to end by themselves: a stubborn one uses all of it, twice, in every test."""


@pytest.fixture(autouse=True)
def short_rest(monkeypatch):
    monkeypatch.setattr(processes, "REST_S", REST_S)


@pytest.fixture
def family(tmp_path):
    """A script whose processes note their ids in a folder; whatever a failing test leaves is killed."""
    script, notes = tmp_path / "family.py", tmp_path / "notes"
    notes.mkdir()
    script.write_text(FAMILY + "time.sleep(600) if len(sys.argv) < 3 else time.sleep(1)\n")

    def pids():
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = {name: (notes / name).read_text() for name in NAMES if (notes / name).exists()}
            if len(found) == len(NAMES) and all(found.values()):
                return {name: int(pid) for name, pid in found.items()}
            time.sleep(0.05)
        raise AssertionError(f"only {sorted(found)} came up")

    yield [sys.executable, str(script), str(notes)], pids
    for note in notes.iterdir():
        if psutil.pid_exists(pid := int(note.read_text() or 0)) and pid:
            os.kill(pid, signal.SIGKILL)


def living(pids):
    return {
        name
        for name, pid in pids.items()
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    }


def test_stop_ends_every_descendant(family, tmp_path):
    argv, pids = family
    tree = ProcessTree(argv, env=os.environ, log=tmp_path / "log")
    started = pids()
    assert living(started) == set(NAMES)
    assert {p.pid for p in tree.alive()} >= set(started.values())
    assert tree.stop() == []
    assert living(started) == set()


def test_what_a_finished_command_leaves_behind_is_ended_too(family, tmp_path):
    argv, pids = family
    tree = ProcessTree([*argv, "short"], env=os.environ, log=tmp_path / "log")
    started = pids()
    assert tree.process.wait(timeout=20) == 0
    assert living(started) == set(NAMES) - {"root"}
    assert tree.stop() == []
    assert living(started) == set()


def test_others_children_are_left_alone(tmp_path):
    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        tree = ProcessTree(["sleep", "60"], env=os.environ, log=tmp_path / "log")
        assert [p.pid for p in tree.alive()] == [tree.process.pid]
        assert tree.stop() == []
        assert mine.poll() is None
    finally:
        mine.kill()
        mine.wait()


def test_a_process_that_may_not_be_signalled_is_told_and_nothing_else_stays(tmp_path, monkeypatch):
    """As one of another user's program, which ran with its owner's rights."""

    def denied(process, sent):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(processes, "TERM_S", 0.1)
    monkeypatch.setattr(processes, "KILL_S", 0.1)
    tree = ProcessTree(["sh", "-c", "echo $TMPDIR; sleep 60"], env=os.environ, log=tmp_path / "log")
    while not (folder := (tmp_path / "log").read_text().strip()):
        time.sleep(0.01)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "send_signal", denied)
            assert tree.process.pid in tree.stop()
        assert not os.path.exists(folder)
    finally:
        os.killpg(tree.process.pid, signal.SIGKILL)
        tree.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_behind(family, tmp_path, number):
    argv, pids = family
    recipe = tmp_path / "recipe.sh"
    recipe.write_text("exec " + " ".join(argv))
    program = interruptible_run(recipe, tmp_path / "out", f"processes.REST_S = {REST_S}")
    demo = subprocess.Popen(
        [sys.executable, "-c", program],
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell that starts the tests in the background has them, and so the demo, ignore SIGINT.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    started = pids()
    demo.send_signal(number)
    time.sleep(0.2)
    demo.send_signal(number)  # impatience must not cut the cleaning up short
    _, errors = demo.communicate(timeout=40)
    assert b"KeyboardInterrupt" in errors
    assert living(started) == set()


def test_an_ignored_hangup_stays_ignored():
    """`nohup python -m demo &` goes on when its shell ends."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGHUP, before)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGTERM)
