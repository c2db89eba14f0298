"""A head for the real policy, made by `verl-tlt warmup`, and what it reached after how much text and computing.

    python -m benchmarks.real_policy.head .cache/real --out benchmarks/results/real_policy.json

It trains `EPOCHS` passes over a response to each of the first `PROMPTS` prompts of the warm-up's side: passes, not
minutes, so that a slow machine makes the same head. That is little text, so that the head drafts about as well as
published heads do, and not better. The accept length at each K of `LENGTHS` is measured on prompts of runs, which share
no step of a chain with those of the warm-up.

The head drafts 8,192 of 49,152 tokens. The policy uses far fewer, and each drafted token reads every row of the head:
for the whole vocabulary three times as much as the layer has.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.e2e.head import Head, call, evaluated, timed
from benchmarks.real_policy.job import LONGEST_RESPONSE, PLACE, real_assets, real_overrides
from benchmarks.real_policy.policy import make_policy
from benchmarks.stored import store
from benchmarks.toy_job import RECIPE, recipe_environment
from verl_cpu.dtype import find_dtype
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.drafter import files_digest, provenance

LENGTHS = (3, 5, 7)
DRAFT_LENGTH, DRAFT_VOCAB = LENGTHS[-1], 8192
PROMPTS, EPOCHS, JUDGED = 256, 3, 48
"""Prompts and passes of the warm-up, and prompts of runs on which the head is measured."""
COMMON = (
    *("--draft-vocab", str(DRAFT_VOCAB)),
    *("--batch-tokens", "1024", "--draft-length", str(DRAFT_LENGTH)),
    *("--epochs", str(EPOCHS)),
)
RECORD = "made.json"
"""Beside the head: what making it took, what it says of itself and what was measured."""


def real_head(folder: Path) -> Head:
    """The head below `folder`, made and measured in a process of its own unless that was done."""
    made = head_facts(folder)
    if "prompts" not in made:
        command = [sys.executable, "-m", "benchmarks.real_policy.head", str(folder)]
        call(command, {**os.environ, **CPU_ENGINE})
        made = head_facts(folder)
    return Head(folder / "drafter", made)


def head_facts(folder: Path) -> dict[str, Any]:
    """What is known of the head of this policy; of a head of another policy, nothing."""
    record = folder / RECORD
    made: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    return made if made and made.get("policy") == _digest(folder) else {}


def _digest(folder: Path) -> str:
    """Of the policy's weights."""
    return files_digest([make_policy(folder) / "model.safetensors"])


def train(folder: Path, prompts: int, options: Sequence[str]) -> None:
    """Make the head of the responses to so many prompts, unless there is one."""
    if not head_facts(folder):
        took = warm_up(folder, folder / "drafter", prompts, options)
        _write(folder, {"policy": _digest(folder), **took})


def measure(folder: Path) -> None:
    """Measure the head unless that was done."""
    made = head_facts(folder)
    if "prompts" not in made:
        _write(folder, made | measured(folder))


def _write(folder: Path, made: dict[str, Any]) -> None:
    (folder / RECORD).write_text(json.dumps(made, indent=1))


def warm_up(folder: Path, drafter: Path, prompts: int, options: Sequence[str]) -> dict[str, Any]:
    """Run the command as a user of the recipe does; what it was asked, and took."""
    assets, fresh = real_assets(folder, "warm-up"), folder / "fresh"
    asked = [*COMMON, "--limit", str(prompts), *options]
    places = ["--prompts", str(assets.train), "--out", str(fresh)]
    alone = CPU_ENGINE | {"OMP_NUM_THREADS": str(os.cpu_count())}  # one process computes at a time
    env = recipe_environment(folder, assets, 1, DTYPE=find_dtype(), TLT="0", **alone)
    took = timed(["verl-tlt", "warmup", *places, *asked, "--", str(RECIPE), *real_overrides(assets)], **env)
    shutil.rmtree(drafter, ignore_errors=True)
    fresh.rename(drafter)
    return {"options": asked, **took}


def measured(folder: Path) -> dict[str, Any]:
    """What the head says of itself, and its accept length on prompts of runs: simulated, and served by stock vLLM."""
    drafter, policy, prompts = folder / "drafter", make_policy(folder), real_assets(folder).train
    made = provenance(drafter)
    said = ("responses", "response_tokens", "steps", "tokens", "training_seconds", "checks", "acceptance")
    simulated, served = {}, {}
    for k in LENGTHS:
        asked = {"limit": JUDGED, "draft_length": k, "response_length": LONGEST_RESPONSE}
        found = evaluated(policy, drafter, prompts, **asked)
        simulated[k], served[k] = (round(one.accept_length, 4) for one in (found.simulated, found.served))
    return {
        "prompts": made["prompts_limit"],
        **{name: made[name] for name in said},
        "accept_length": made["tau_sim"],
        "accept_length_simulated": simulated,
        "accept_length_served": served,
    }


@interruptible()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=PLACE)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="the first so many, a response each")
    parser.add_argument("--out", type=Path)
    options, more = parser.parse_known_args()  # more: of the command
    os.environ.update(CPU_ENGINE)
    folder = options.folder.resolve()
    train(folder, options.prompts, more)
    measure(folder)
    facts = real_head(folder).facts
    print(json.dumps(facts, indent=1))
    if options.out:
        store(options.out, {"head": facts})


if __name__ == "__main__":
    main()
