"""An engine in a child process, for the commands that start one.

A child process returns all its memory on every device when it ends, and a crash of the engine becomes one sentence.
The parent calls `run_job`, which starts `python -P -m MODULE DIRECTORY PARENT`; that module calls `serve_job`. In the
directory, `job.json` has the child's job, `answer.json` its answer, and `engine.log` what it printed.
"""

import contextlib
import ctypes
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_tlt.commands.console import last_lines
from verl_tlt.commands.processes import running
from verl_tlt.errors import TLTError

LOG = "engine.log"
POLL_S = 1.0
SPAWNED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""Importing verl counts GPUs, after which a forked process can use none; and vLLM forks, except in Ray's processes."""
_PR_SET_PDEATHSIG = 1


class ChildEngineError(TLTError):
    """The engine could not do its job: the child's sentence, or the end of the child's log."""


def require_cpu_platform() -> None:
    """Raise a `ChildEngineError` unless a CPU stands in for the GPU that an engine needs."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        raise ChildEngineError(
            "vLLM's engine needs a GPU, and there is none here. In a clone of verl-tlt a CPU can stand in for it: "
            "export $(python -m verl_cpu.environment)."
        )


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for a job; an engine's log that an error names is kept in another one."""
    with tempfile.TemporaryDirectory(prefix="tlt-engine-") as folder:
        log = Path(folder) / LOG
        try:
            yield Path(folder)
        except ChildEngineError as error:
            if str(log) not in str(error):
                raise
            kept = Path(tempfile.mkdtemp(prefix="tlt-log-")) / LOG
            raise ChildEngineError(str(error).replace(str(log), str(log.rename(kept)))) from error


def run_job(
    module: str,
    job: Mapping[str, Any],
    directory: Path,
    environment: Mapping[str, str],
    timeout_s: float = math.inf,
    tell: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Have a child process do `job`, and return its answer.

    The child has this process's environment with `environment` added, and `SPAWNED` unless one of them sets the same
    variables. `tell` is called every `POLL_S` while the child runs. A `ChildEngineError` says that the child refused,
    ended without an answer, or took too long.
    """
    directory.mkdir(parents=True, exist_ok=True)
    answer = directory / "answer.json"
    log = directory / LOG
    for old in (answer, log):
        old.unlink(missing_ok=True)
    (directory / "job.json").write_text(json.dumps(job))
    deadline = time.monotonic() + timeout_s
    command = [sys.executable, "-P", "-m", module, str(directory), str(os.getpid())]  # -P: nothing of the user's folder
    with running(command, env={**SPAWNED, **os.environ, **environment}, log=log) as tree:
        while tree.process.poll() is None:
            tell()
            if time.monotonic() > deadline:
                raise ChildEngineError(f"The engine was not done after {timeout_s:.0f} s; its log is {log}.")
            time.sleep(POLL_S)
    if not answer.is_file():  # written last: a crash while the child ends changes nothing
        raise ChildEngineError(f"The engine ended early ({log}):\n{last_lines(log)}")
    reply: dict[str, Any] = json.loads(answer.read_text())
    if "refused" in reply:
        raise ChildEngineError(reply["refused"])
    return reply


def serve_job(work: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    """The child's side: call `work(job, directory)` with the parent's job, and write its result as the answer.

    A `TLTError` is answered with its sentence; any other exception ends the process, and its traceback is in the log.
    """
    # The child ends with its parent, however that ends. It leaves by an exception, so that vLLM's processes, which do
    # not look at their parent, are ended too: as daemons of multiprocessing, at its exit.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    directory = Path(sys.argv[1])
    parent = int(sys.argv[2])
    if os.getppid() != parent:
        raise SystemExit("The command that started this engine has ended.")
    try:
        answer = work(json.loads((directory / "job.json").read_text()), directory)
    except TLTError as error:
        answer = {"refused": str(error)}
    (directory / "answer.partial").write_text(json.dumps(answer))
    (directory / "answer.partial").rename(directory / "answer.json")
