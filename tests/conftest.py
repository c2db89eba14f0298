"""The environment of every test: set before any test module is collected, since verl and vLLM read it when imported."""

import atexit
import os
import runpy
from pathlib import Path

import pytest

from verl_tlt.compat.cpu.environment import CPU_ENGINE

os.environ.update(CPU_ENGINE, HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")
STARTUP = Path(__file__).with_name("startup")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
runpy.run_path(str(STARTUP / "sitecustomize.py"))  # this process has started already

FINISHED = pytest.StashKey[pytest.Session]()


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
