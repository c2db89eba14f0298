"""The environment of every test: set before any test module is collected, since verl and vLLM read it when imported."""

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from verl_cpu.environment import CPU_ENGINE

os.environ.update(CPU_ENGINE, HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")
STARTUP = Path(__file__).with_name("startup")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
gc.set_threshold(50_000, 20, 20)  # this process has started already
# Tests compose verl's config some hundred times, each time from 110 KB of YAML; OmegaConf looks this up at each call.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

STARTS_PROCESSES = {"engine", "e2e"}
"""Marks of tests for which a fork server is worth its own start."""
FINISHED = pytest.StashKey[pytest.Session]()


def pytest_collection_finish(session):
    if any(STARTS_PROCESSES & {mark.name for mark in item.iter_markers()} for item in session.items):
        session.config.add_cleanup(fork_server())


def fork_server() -> Callable[[], None]:
    """Start one for the processes of these tests, unless there is one or none is wanted; returns what ends it."""
    if "TLT_TESTS_FORK" in os.environ:
        return lambda: None
    folder = tempfile.mkdtemp(prefix="tlt-fork-")
    address = os.environ["TLT_TESTS_FORK"] = os.path.join(folder, "socket")
    environment = os.environ | {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # a fork has one thread only
    command = [sys.executable, STARTUP / "fork_server.py", address]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)

    def end() -> None:
        server.communicate()
        shutil.rmtree(folder)
        del os.environ["TLT_TESTS_FORK"]

    return end


@pytest.fixture(scope="session")
def forked():
    """Processes that a test starts may be forks, in a session without marks that say so."""
    end = fork_server()
    yield
    end()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    session.config.stash[FINISHED] = session


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Leave with the tests' status, without the interpreter's own end: a thread crashed there once (SIGSEGV),
    after everything had passed. What Python registered for the end still runs.
    """
    session = config.stash.get(FINISHED, None)
    if session is not None:
        config.get_terminal_writer().flush()
        atexit._run_exitfuncs()
        os._exit(int(session.exitstatus))
