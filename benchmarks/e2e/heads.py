"""The drafters of the bench, each made once as its name says, and kept with what making it took and reached.

* `warm` is what the docs recommend: the command `verl-tlt warmup` made it, from the policy's own responses to prompts
  that the bench does not have.
* `stale` is made in the same way, from a random head and in as many steps, but for an earlier policy, as a released
  head is for the model before RL. That policy gets most digits wrong, which RL unlearns. How many is chosen so that the
  bench's policy is as far from it as RL runs move: `MOVED`. The head has never seen the bench's policy.
* `random` was not trained.

Seconds are of the whole command, on one core. Accept lengths are on prompts that the command held out, for the policy
that the drafter was made for: as the command simulates it, and as stock vLLM counts it (`verl-tlt evaluate`). Of the
stale one `accept_length_bench` is what stock vLLM counts with the bench's policy.
"""

from __future__ import annotations

import json
import os
import random
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

from demo.machine import find_dtype
from demo.toy.assets import AUX_LAYERS, SHIPPED_POLICY, build_assets, demo_width
from demo.toy.head import DRAFT_LENGTH, INTERMEDIATE, other_prompts, warmup_command
from verl_cpu.environment import CPU_ENGINE

if TYPE_CHECKING:
    from verl_tlt.commands.warmup.evaluate import Verdict

BENCH_SEED = 1
"""Of the prompts that the bench itself has: others than the demo's."""
BENCH_PROMPTS = 512
NAMES = WARM, STALE, RANDOM = ("warm", "stale", "random")
PROMPTS, MINUTES = 1024, 8.0
"""Of a warm-up: one response each, and minutes of training; generating comes before."""
MOVED = 0.1
"""Nats a token, KL from the policy before RL: the median of the last `actor/kl_loss` in the published notes of twelve
GRPO runs with verl, of 45 steps and more (0.0086 to 0.72)."""
WRONG_DIGITS, LESSONS = 0.8, 200
"""What makes the earlier policy of the bench's: so many steps on demonstrations with so many wrong digits, by which
`distance` is about `MOVED`."""
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


def home_of(folder: Path, name: str) -> Path:
    """Where that head is kept; its `drafter` is one that an engine loads."""
    return folder / "heads" / f"{name}-{demo_width(find_dtype())}"


def prepare(folder: Path, name: str) -> Head:
    """The head of that name below `folder`, made unless it is there."""
    home = home_of(folder, name)
    if not (home / RECORD).exists():
        with patch.dict(os.environ, CPU_ENGINE):
            make(folder, name)
    return Head(home / "drafter", json.loads((home / RECORD).read_text()))


def make(folder: Path, name: str) -> None:
    """Make it and keep its record; a try that was cut off begins anew, or its seconds would be too few."""
    home = home_of(folder, name)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    policy = build_assets(folder, width=demo_width(find_dtype()), train_rows=1, val_rows=1).policy
    if name == RANDOM:
        facts = _untrained(policy, home / "drafter")
    elif name == STALE:
        steps, earlier = prepare(folder, WARM).facts["steps"], home / "policy"
        facts = {**_earlier_policy(earlier), **_warm_up(earlier, home, "--max-steps", str(steps))}
        facts["accept_length_bench"] = _served(home, policy)
    else:
        facts = _warm_up(policy, home, "--max-minutes", str(MINUTES))
    (home / RECORD).write_text(json.dumps(facts, indent=1))


def _warm_up(policy: Path, home: Path, *until: str) -> dict[str, Any]:
    """Run the command on a policy from a random head, `until` a limit of its; the drafter is `home / "drafter"`.

    Returns what it says of itself, and what stock vLLM counts on the prompts that it held out.
    """
    from verl_tlt.drafter import provenance

    prompts, drafter = home / "prompts.parquet", home / "drafter"
    other_prompts(prompts, PROMPTS, BENCH_SEED, BENCH_PROMPTS)
    took = timed(warmup_command(str(policy), str(prompts), str(drafter), *until))
    made = provenance(drafter)
    return {
        "made_by": " ".join(warmup_command("MODEL", "PROMPTS", "OUT", *until)),
        **took,
        **{name: made[name] for name in ("prompts_used", "response_tokens", "steps", "training_seconds", "acceptance")},
        "draft_length": DRAFT_LENGTH,
        "accept_length": made["tau_sim"],
        "accept_length_served": _served(home, policy),
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
    options |= {"drafter": home / "drafter", "model": policy, "draft_length": DRAFT_LENGTH, "device": "cpu", **asked}
    return evaluate(EvaluateOptions(**options), Console())


def _served(home: Path, policy: Path) -> float:
    return round(evaluated(home, policy).served.accept_length, 4)


def _untrained(policy: Path, target: Path) -> dict[str, Any]:
    from benchmarks.lossless.tiny_policy import build_drafter_dir

    layers = AUX_LAYERS[demo_width(find_dtype())]
    build_drafter_dir(target, policy, informed=False, aux_layers=layers, intermediate_size=INTERMEDIATE)
    return {"made_by": "random weights"}


def _earlier_policy(target: Path) -> dict[str, Any]:
    """Write the policy that the stale head is made for, and how far the bench's is from it."""
    from demo.toy.train import TrainConfig, save_policy, train
    from demo.toy.widen import HALF_MLP_WIDTH, MLP_WIDTH, widen

    small = target.with_name("small")
    lessons = TrainConfig(steps=LESSONS, learning_rate=5e-4, seed=1, slip=WRONG_DIGITS)
    save_policy(train(lessons, find_dtype(), SHIPPED_POLICY), small)
    widen(small, target, MLP_WIDTH if demo_width(find_dtype()) == "wide" else HALF_MLP_WIDTH)
    return {
        "policy": f"the bench's after {LESSONS} more steps on demonstrations with {WRONG_DIGITS:.0%} wrong digits",
        "kl_per_token": round(distance(SHIPPED_POLICY, small), 4),
    }


def distance(policy: Path, other: Path, texts: int = 48) -> float:
    """KL(policy || other) in nats a token, on responses that the policy writes at temperature 1."""
    import torch
    from transformers import Qwen3ForCausalLM

    from benchmarks.drafter.trajectory import sample
    from demo.toy import task

    models = [Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (policy, other)]
    rng, total, count = random.Random(0), 0.0, 0
    prompts = [[task.TOKEN_ID[w] for w in task.prompt_tokens(task.sample_problem(rng))] for _ in range(texts)]
    with torch.no_grad():
        for text in sample(models[0], prompts, 1, seed=0):
            ids = torch.tensor([text.tokens])
            mine, theirs = (model(ids).logits[0, text.prompt_len - 1 : -1].log_softmax(-1) for model in models)
            total += float((mine.exp() * (mine - theirs)).sum())
            count += len(mine)
    return total / count


def timed(command: Sequence[str], **environment: str) -> dict[str, int]:
    """Run a command of `verl-tlt`; its seconds, and those of all processes that it waited for, and theirs."""
    program = str(Path(sys.executable).parent / command[0])
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([program, *command[1:]], env={**os.environ, **environment}, check=True)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds), "cpu_seconds": round(spent)}
