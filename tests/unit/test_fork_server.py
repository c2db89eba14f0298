"""A process that is a fork of the tests' server is, to its parent and to itself, the process that was started."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

STARTUP = Path(__file__).parents[1] / "startup"
ABOUT = """
import json, os, random, sys, tempfile
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "variable": os.environ.get("ITS_OWN"), "path": sys.path[0],
    "ahead": "fractions" in sys.modules, "group": os.getpgid(0) == os.getpid(), "pid": os.getpid(), "main": __name__,
    "random": random.random(), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "temporary": tempfile.gettempdir(),
}))
os.write(int(sys.argv[1]), b"through a pipe")
sys.exit(3)
"""


@pytest.fixture
def server(tmp_path):
    """(address, process) of one that has imported `fractions`, and a library that asks where temporary files go."""
    address = tmp_path / "socket"
    (tmp_path / "asks.py").write_text("import tempfile\ntempfile.gettempdir()\n")
    environment = os.environ | {"PYTHONPATH": f"{STARTUP}{os.pathsep}{tmp_path}", "TLT_TESTS_FORK": "0"}
    command = [sys.executable, STARTUP / "fork_server.py", address, "fractions", "asks"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    deadline = time.time() + 60
    while not address.exists():
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.02)
    yield str(address), process
    process.communicate()


@pytest.fixture
def start(server, tmp_path):
    """Start a script as Ray starts its workers."""

    def start(code, *arguments, **environment):
        script = tmp_path / "default_worker.py"
        script.write_text(code)
        variables = {"PYTHONPATH": str(STARTUP), "TLT_TESTS_FORK": server[0], "ITS_OWN": "here", **environment}
        return subprocess.Popen(
            [sys.executable, "-u", script, *arguments], env=os.environ | variables, cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, close_fds=False,
        )  # fmt: skip

    return start


def about(start, **environment):
    read, write = os.pipe()
    os.set_inheritable(write, True)
    process = start(ABOUT, str(write), **environment)
    os.close(write)
    said = json.loads(process.communicate(timeout=60)[0])
    assert os.read(read, 100) == b"through a pipe" and os.read(read, 100) == b"", "another process holds it open"
    os.close(read)
    assert process.returncode == 3
    return said, process.pid, str(write)


def test_it_has_what_the_server_imported_and_all_else_is_its_own(start, tmp_path):
    said, pid, write = about(start)
    assert said["ahead"] and said["group"] and said["pid"] != pid
    assert said["argv"] == [str(tmp_path / "default_worker.py"), write]
    assert (said["cwd"], said["path"], said["main"]) == (str(tmp_path), str(tmp_path), "__main__")
    assert said["variable"] == "here" and said["nice"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert about(start)[0]["random"] != said["random"]
    (tmp_path / "own").mkdir()
    assert about(start, TMPDIR=str(tmp_path / "own"))[0]["temporary"] == str(tmp_path / "own")


@pytest.mark.parametrize("why", [{"OMP_NUM_THREADS": "7"}, {"TLT_TESTS_FORK": "0"}, {"TLT_TESTS_FORK": "/nowhere"}])
def test_one_that_cannot_be_a_fork_starts_by_itself(start, why):
    said, pid, _ = about(start, **why)
    assert said["pid"] == pid and not said["ahead"] and said["variable"] == "here"


WAITING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(60)
"""


def gone(pid):
    deadline = time.time() + 30
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.time() < deadline, "it lives on"
            time.sleep(0.02)


def test_a_signal_reaches_it_and_it_ends_with_the_process_that_was_started_or_with_the_server(start, server):
    told, killed, left = (start(WAITING) for _ in range(3))
    told.stdout.readline()
    told.terminate()
    assert told.wait(30) == 5
    pids = [int(process.stdout.readline()) for process in (killed, left)]
    killed.kill()
    assert killed.wait(30) == -signal.SIGKILL
    gone(pids[0])
    assert left.poll() is None and psutil.pid_exists(pids[1])
    server[1].stdin.close()
    gone(pids[1])
    assert left.wait(30) != 0
