"""Nothing outlives a stopped tree: real processes that detach themselves as Ray's and vLLM's do, and their files."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from verl_tlt.commands import processes
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.commands.processes import LONGEST_BASE, ProcessTree
from verl_tlt.errors import TLTError

FAMILY = """
import multiprocessing, os, signal, sys, tempfile, time
from multiprocessing import shared_memory
name, kept = sys.argv[1], []

def note(who, more=""):
    with open(f"/tmp/{name}.noting-{who}", "w") as file:
        file.write(f"{os.getpid()} {more}")
    os.rename(file.name, f"/tmp/{name}.note-{who}")

def child(who, stubborn=False, then=lambda: None):
    if os.fork():
        return
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else signal.SIG_DFL)
    then()
    note(who)
    time.sleep(600)

def own(who):
    for i in range(3):
        kept.append(shared_memory.SharedMemory(f"{name}-{who}-{i}", create=True, size=4096))
        time.sleep(0.15)
    kept.append(multiprocessing.get_context("spawn").Semaphore())
    tempfile.mkdtemp()
    note(who, kept[-1]._semlock.name)

child("stubborn", stubborn=True)
child("nested", then=lambda: child("grandchild"))
if os.fork() == 0:  # a daemon: its parent is gone at once, and so is its environment
    os.setsid()
    if os.fork():
        os._exit(0)
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    os.execve(sys.executable, [sys.executable, "-c", code, f"/tmp/{name}.note-daemon"], {})
child("owner", then=lambda: own("owner") or time.sleep(600))
(own if len(sys.argv) < 3 else note)("root")
time.sleep(600 if len(sys.argv) < 3 else 1)
"""
NAMES = {"root", "stubborn", "nested", "grandchild", "daemon", "owner"}
OWNED = 6
"""Three segments of each of two processes; each has a semaphore too, whose name is in its note."""
SHM = Path("/dev/shm")
REST_S = 0.5
"""What descendants get to end by themselves: a stubborn one uses all of it, twice, in every test."""


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    """An empty temporary folder with a short name, for this test's runs alone; `tmp_path` is not in it."""
    monkeypatch.setattr(processes, "REST_S", REST_S)
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


class Family:
    """A command of which every process notes its id; whatever a failing test leaves is killed and removed."""

    def __init__(self, script):
        self.name = f"tlt-test-{uuid.uuid4().hex[:8]}"
        self.argv = [sys.executable, str(script), self.name]
        script.write_text(FAMILY)

    def notes(self):
        """What is noted by now: {process: its id, and the name of its semaphore}."""
        found = Path("/tmp").glob(f"{self.name}.note-*")
        return {path.name.rpartition("-")[2]: words for path in found if (words := path.read_text().split())}

    def up(self):
        """The notes once all is made."""
        deadline = time.monotonic() + 20
        while (found := self.notes()).keys() != NAMES:
            assert time.monotonic() < deadline, f"only {sorted(found)} came up"
            time.sleep(0.02)
        return found

    def living(self):
        ids = {who: int(words[0]) for who, words in self.notes().items()}
        alive = {who for who, pid in ids.items() if psutil.pid_exists(pid)}
        return {who for who in alive if psutil.Process(ids[who]).status() != psutil.STATUS_ZOMBIE}

    def files(self):
        """Its segments that are there, and semaphores that are noted."""
        semaphores = [SHM / f"sem.{words[1].strip('/')}" for words in self.notes().values() if len(words) > 1]
        return {*SHM.glob(f"{self.name}*"), *filter(Path.exists, semaphores)}

    def gone(self, base):
        return (self.living(), self.files(), list(base.iterdir())) == (set(), set(), [])

    def clear(self):
        for who in self.living():
            os.kill(int(self.notes()[who][0]), signal.SIGKILL)
        for path in {*self.files(), *Path("/tmp").glob(f"{self.name}*")}:
            path.unlink()


@pytest.fixture
def family(tmp_path):
    family = Family(tmp_path / "family.py")
    yield family
    family.clear()


@pytest.mark.parametrize("short", [(), ("short",)], ids=["it runs", "it has ended"])
def test_every_process_is_ended_and_what_it_owns_removed_and_nothing_else(family, base, tmp_path, short):
    bystander = subprocess.Popen(["sleep", "60"])
    tree = ProcessTree([*family.argv, *short], env=os.environ, log=tmp_path / "log")
    try:
        ids = {int(words[0]) for words in family.up().values()}
        if short:
            assert tree.process.wait(timeout=20) == 0
        assert family.living() == NAMES - ({"root"} if short else set())
        assert {p.pid for p in tree.alive()} >= ids - ({tree.process.pid} if short else set())
        assert bystander.pid not in {p.pid for p in tree.alive()}
        owners = 1 if short else 2
        assert len(family.files()) == owners * (OWNED // 2 + 1) and len(list(base.glob("*/*"))) == owners
        assert tree.stop() == [] and family.gone(base)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(("number", "made"), [(signal.SIGTERM, 0), (signal.SIGTERM, 4), (signal.SIGINT, OWNED)])
def test_an_interrupted_command_leaves_nothing_whenever_it_comes(family, base, tmp_path, number, made):
    log = tmp_path / "log"
    with log.open("wb") as out:
        command = subprocess.Popen(
            [sys.executable, "-m", "verl_tlt.commands.cli", "doctor", "--", *family.argv],
            stdout=out,
            stderr=out,
            # A shell that starts the tests in the background has them, and so the command, ignore SIGINT.
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
    while not [*base.glob("*/log")] or len(family.files()) < made:  # that of its tree, which is being started
        assert command.poll() is None
        time.sleep(0.005)
    if made == OWNED:
        family.up()
    command.send_signal(number)
    if made:  # the cleaning up takes a while, and impatience must not cut it short
        time.sleep(0.2)
        command.send_signal(number)
    assert command.wait(timeout=60) == 130 and "Traceback" not in log.read_text()
    for folder in base.glob("tmp*"):  # a captured command has the user's TMPDIR, where its folders stay
        folder.rmdir()
    assert family.gone(base)


def test_a_process_that_may_not_be_signalled_is_told_and_nothing_else_stays(base, tmp_path, monkeypatch):
    """As one of another user's program, which ran with its owner's rights."""

    def denied(process, sent):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(processes, "TERM_S", 0.1)
    monkeypatch.setattr(processes, "KILL_S", 0.1)
    tree = ProcessTree(["sleep", "60"], env=os.environ, log=tmp_path / "log")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "send_signal", denied)
            assert tree.process.pid in tree.stop()
        assert list(base.iterdir()) == []
    finally:
        os.killpg(tree.process.pid, signal.SIGKILL)
        tree.process.wait()


def test_a_command_that_cannot_start_leaves_nothing(base, tmp_path):
    with pytest.raises(FileNotFoundError):
        ProcessTree(["true"], env=os.environ, log=tmp_path / "log", cwd=tmp_path / "nowhere")
    assert list(base.iterdir()) == []


def test_a_long_temporary_folder_is_not_used(tmp_path, monkeypatch):
    """Ray's sockets in it would have names that Linux refuses."""
    (long := tmp_path / ("x" * LONGEST_BASE)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    tree = ProcessTree(["sh", "-c", "echo $TMPDIR"], env=os.environ, log=tmp_path / "log")
    tree.process.wait(timeout=20)
    folder = Path((tmp_path / "log").read_text().strip())
    assert folder.parent == Path("/tmp") and folder.is_dir()
    socket = f"/{folder.name}/ray/session_2026-11-30_13-44-00_123456_1234567/sockets/plasma_store"
    assert LONGEST_BASE + len(socket) <= 107
    assert tree.stop() == [] and not folder.exists()


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


@pytest.mark.parametrize(
    ("raised", "seen"), [(RuntimeError, KeyboardInterrupt), (TLTError, TLTError), (OSError, OSError)]
)
def test_a_librarys_error_in_place_of_the_interrupt_is_one(raised, seen):
    """But what could not be ended is said."""
    with pytest.raises(seen), interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise raised("the stack is not what it was")


def test_an_error_without_a_signal_stays_what_it_is():
    with pytest.raises(RuntimeError), interruptible():
        try:
            {}["key"]
        except KeyError:
            raise RuntimeError from None


@pytest.mark.parametrize(("code", "waits"), [(0, True), (1, False)])
def test_what_a_script_left_in_the_background_is_waited_for_unless_the_script_failed(tmp_path, code, waits):
    (tmp_path / "made_program.py").write_text("import time; time.sleep(3)\n")
    text = f"{sys.executable} made_program.py & sleep 600 & exit {code}"
    with processes.running(["bash", "-c", text], env=os.environ, log=tmp_path / "log", cwd=tmp_path) as tree:
        began = time.monotonic()
        while (status := tree.status("made_program")) is None:
            assert time.monotonic() < began + 60
            time.sleep(0.1)
        seconds = time.monotonic() - began
    assert status == code and (seconds > 2.5) == waits
