"""An engine in a child process, for the commands that start one.

A process of its own returns all memory when it ends, on every device, and a crash of the engine ends in a sentence.
The parent calls `run_job`, which starts `python -m MODULE DIRECTORY`; that module calls `serve_job`. In the directory,
`job.json` is what the child is asked, `answer.json` what it answers, `engine.log` what it printed.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_tlt.errors import TLTError

LOG = "engine.log"
POLL_S = 1.0
_LAST_LINES = 15
_PATIENCE_S = 20.0
"""For a child that is told to end."""
_PR_SET_PDEATHSIG = 1


class ChildEngineError(TLTError):
    """The engine could not do its job: the child's own sentence, or the end of its log."""


def require_cpu_platform() -> None:
    """Raise a `ChildEngineError` where the environment lacks what vLLM's CPU backend needs."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        raise ChildEngineError(
            "An engine on the CPU needs the CPU platform and its variables: export $(python -m verl_cpu.environment)."
        )


def run_job(
    module: str,
    job: Mapping[str, Any],
    directory: Path,
    environment: Mapping[str, str],
    timeout_s: float = math.inf,
    tell: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Have a child process do `job`, and return its answer.

    `environment` is added to this process's own; `tell` is called every `POLL_S` while the child runs. A
    `ChildEngineError` says that it refused, ended without an answer, or took too long.
    """
    directory.mkdir(parents=True, exist_ok=True)
    answer, log = directory / "answer.json", directory / LOG
    answer.unlink(missing_ok=True)
    (directory / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", module, str(directory)]
    deadline = time.monotonic() + timeout_s
    with log.open("w") as stream:
        child = subprocess.Popen(command, env={**os.environ, **environment}, stdout=stream, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None:
                tell()
                if (left := deadline - time.monotonic()) <= 0:
                    raise ChildEngineError(f"The engine was not done after {timeout_s:.0f} s; its log is {log}.")
                with suppress(subprocess.TimeoutExpired):
                    child.wait(min(POLL_S, left))
        finally:
            _end(child)
    if not answer.is_file():  # it is the last thing the child does: a crash while it ends changes nothing
        end = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        raise ChildEngineError(f"The engine ended early ({log}):\n{end}")
    if "refused" in (found := json.loads(answer.read_text())):
        raise ChildEngineError(found["refused"])
    return found


def serve_job(work: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    """The child's side: call `work(job, directory)` with what the parent asks, and write what it returns as the answer.

    A `TLTError` is answered with its sentence; any other exception ends the process, and its traceback is in the log.
    """
    # Ends with its parent, however that ends, and vLLM's own children with it: nobody else would stop the engine.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    directory = Path(sys.argv[1])
    try:
        answer = work(json.loads((directory / "job.json").read_text()), directory)
    except TLTError as error:
        answer = {"refused": str(error)}
    (directory / "answer.partial").write_text(json.dumps(answer))
    (directory / "answer.partial").rename(directory / "answer.json")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
