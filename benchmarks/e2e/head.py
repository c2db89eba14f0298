"""A drafter of a benchmark and what is known of it, and the commands of `verl-tlt` by which it is made and measured."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_tlt.commands.warmup.evaluate import Verdict

END_S = 120.0
"""Seconds for an interrupted command to end."""


@dataclass(frozen=True)
class Head:
    """A drafter and what is known of it."""

    drafter: Path
    facts: dict[str, Any]

    @property
    def acceptance(self) -> list[float]:
        """P(position i accepted | all before accepted), on held-out prompts; [draft length]."""
        return list(self.facts["acceptance"])


def evaluated(policy: Path, drafter: Path, prompts: Path, **asked: Any) -> Verdict:
    """What stock vLLM counts with this policy and drafter on these prompts, and what is predicted of it.

    `asked`: more options of `verl-tlt evaluate`.
    """
    from rich.console import Console

    from verl_tlt.commands.options import EvaluateOptions
    from verl_tlt.commands.warmup.evaluate import evaluate

    options = EvaluateOptions(model=policy, drafter=drafter, prompts=[prompts], **asked)
    return evaluate(options, Console())


def call(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command to its end; where this process is interrupted, the command is, too."""
    process = subprocess.Popen(command, env=environment)
    try:
        if code := process.wait():
            raise subprocess.CalledProcessError(code, command)
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def timed(command: Sequence[str], **environment: str) -> dict[str, int]:
    """Run a command of `verl-tlt`; its seconds, and those of all processes that it waited for, and theirs."""
    program = str(Path(sys.executable).parent / command[0])
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    call([program, *command[1:]], {**os.environ, **environment})
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds), "cpu_seconds": round(spent)}
