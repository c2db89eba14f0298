"""The drafter that the toy's arms start from, made once by `verl-tlt warmup` and kept with what making it took.

It learns from the policy's own responses to prompts that the bench does not have. Seconds are of the whole command, on
one core. Accept lengths are on prompts that the command held out: as the command simulates it, and as stock vLLM counts
it (`verl-tlt evaluate`).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.toy.assets import build_assets, demo_width
from tests.toy.head import DRAFT_LENGTH, other_prompts, warmup_command
from verl_cpu.dtype import find_dtype
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.drafter import provenance

if TYPE_CHECKING:
    from verl_tlt.commands.warmup.evaluate import Verdict

BENCH_SEED = 1
"""Of the prompts that the bench itself has: others than the demo's."""
BENCH_PROMPTS = 512
PROMPTS, MINUTES = 1024, 8.0
"""Of a warm-up: one response each, and minutes of training; generating comes before."""
RECORD = "made.json"


@dataclass(frozen=True)
class Head:
    """A drafter and what is known of it."""

    drafter: Path
    facts: dict[str, Any]

    @property
    def acceptance(self) -> list[float]:
        """P(position i accepted | all before accepted), on held-out prompts; [LONGEST]."""
        return list(self.facts["acceptance"])


def prepare(folder: Path) -> Head:
    """The toy's head below `folder`, made unless it is there."""
    home = folder / "heads" / f"warm-{demo_width(find_dtype())}"
    record = home / RECORD
    if not record.exists():  # a try that was cut off begins anew, or its seconds would be too few
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        with patch.dict(os.environ, CPU_ENGINE):
            record.write_text(json.dumps(_make(folder, home), indent=1))
    return Head(home / "drafter", json.loads(record.read_text()))


def _make(folder: Path, home: Path) -> dict[str, Any]:
    """Run the command from a random head; what it says of itself, and what stock vLLM counts."""
    policy = build_assets(folder, width=demo_width(find_dtype()), train_rows=1, val_rows=1).policy
    prompts, drafter, until = home / "prompts.parquet", home / "drafter", ("--max-minutes", str(MINUTES))
    other_prompts(prompts, PROMPTS, BENCH_SEED, BENCH_PROMPTS)
    took = timed(warmup_command(str(policy), str(prompts), str(drafter), *until))
    made = provenance(drafter)
    return {
        "made_by": " ".join(warmup_command("MODEL", "PROMPTS", "OUT", *until)),
        **took,
        **{name: made[name] for name in ("prompts_used", "response_tokens", "steps", "training_seconds", "acceptance")},
        "draft_length": DRAFT_LENGTH,
        "accept_length": made["tau_sim"],
        "accept_length_served": round(evaluated(home, policy).served.accept_length, 4),
        "date": made["date"],
    }


def evaluated(home: Path, policy: Path, **asked: Any) -> Verdict:
    """What stock vLLM counts with this policy on the prompts that the warm-up held out, and what is predicted of it.

    `asked`: options that are other than the toy's.
    """
    from rich.console import Console

    from verl_tlt.commands.options import EvaluateOptions
    from verl_tlt.commands.warmup.evaluate import evaluate

    options: dict[str, Any] = {"prompts": [home / "prompts.parquet"], "response_length": 1400}
    options |= {"drafter": home / "drafter", "model": policy, "draft_length": DRAFT_LENGTH, **asked}
    return evaluate(EvaluateOptions(**options), Console())


def timed(command: Sequence[str], **environment: str) -> dict[str, int]:
    """Run a command of `verl-tlt`; its seconds, and those of all processes that it waited for, and theirs."""
    program = str(Path(sys.executable).parent / command[0])
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([program, *command[1:]], env={**os.environ, **environment}, check=True)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds), "cpu_seconds": round(spent)}
