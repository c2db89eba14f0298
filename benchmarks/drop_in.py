"""Is TLT a drop-in? Runs a recipe of somebody else's, unchanged, with and without the flag, and compares.

    python -m benchmarks.drop_in RECIPE.sh --out DIR [--steps 6] [overrides that make this recipe toy-sized]

Each arm runs on the CPU with the toy policy: the recipe, then the overrides of `recipes/check.py`, then with TLT
`+trainer.plugin=tlt`. They are appended where the recipe calls `python -m verl.trainer.main_ppo`, since not every
recipe hands its own arguments on. Compared are the reward and response length of all steps, which must agree within
their spread (sampling differs), and the tokens of a greedy validation before training, which must be the same. The
drafter drafts in every step (`policy=fixed`), or equal tokens would prove nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes import check

ROOT = Path(__file__).parents[1]
FSDP2 = ("actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2")
"""FSDP1, which verl defaults to, cannot start on a CPU."""


def stand_in(directory: Path, overrides: list[str]) -> Path:
    """A folder for PATH whose `python` and `python3` append `overrides` to a call of verl's trainer."""
    directory.mkdir(parents=True, exist_ok=True)
    script = (
        f"#!{sys.executable}\nimport os, sys\narguments = sys.argv[1:]\n"
        f"if arguments[:2] == ['-m', 'verl.trainer.main_ppo']:\n    arguments += {overrides!r}\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])\n"
    )
    for name in ("python", "python3"):
        (directory / name).write_text(script)
        (directory / name).chmod(0o755)
    return directory


def run(recipe: Path, out: Path, steps: int, tlt: bool, extra: list[str]) -> dict[str, Any]:
    """One arm; its rewards and lengths by step, and its greedy answers by prompt.

    Raises:
        RuntimeError: the run failed; the end of its log.
    """
    from demo.toy.assets import build_assets

    out.mkdir(parents=True, exist_ok=True)
    assets = build_assets(out.parent / "assets", width="small", train_rows=64, val_rows=16)
    metrics = out / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    flag = ["+trainer.plugin=tlt", *(f"+{setting}" for setting in check.TLT), f"+tlt.trace.dir={out / 'trace'}"]
    overrides = [
        *check.TOY, *FSDP2, f"hydra.run.dir={out / 'hydra'}", f"data.train_files={assets.train}",
        f"data.val_files={assets.val}", f"actor_rollout_ref.model.path={assets.policy}", "data.seed=1",
        f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={out / 'checkpoints'}",
        "trainer.val_before_train=True", "actor_rollout_ref.rollout.val_kwargs.do_sample=False",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0", f"trainer.validation_data_dir={out / 'validation'}",
        *extra, *(flag if tlt else []),
    ]  # fmt: skip
    environment = {
        **os.environ, **check.CPU, "VERL_FILE_LOGGER_PATH": str(metrics), "DEVICE": "gpu",
        "MODEL_PATH": str(assets.policy), "CKPTS_DIR": str(out / "checkpoints"),
        "PATH": os.pathsep.join((str(stand_in(out / "bin", overrides)), os.environ["PATH"])),
    }  # fmt: skip
    with (out / "log").open("w") as log:
        done = subprocess.run(["bash", str(recipe)], env=environment, cwd=out, stdout=log, stderr=log, timeout=1800)
    if done.returncode:
        tail = "\n".join((out / "log").read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{recipe.name} {'with' if tlt else 'without'} TLT ended with {done.returncode}.\n{tail}")
    logged = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    trained = [step for step in logged if "critic/score/mean" in step]
    greedy = [json.loads(line) for line in (out / "validation" / "0.jsonl").read_text().splitlines()]
    return {
        "reward": [step["critic/score/mean"] for step in trained],
        "length": [step["response_length/mean"] for step in trained],
        "accept_length": [step["tlt/accept_length"] for step in trained if "tlt/accept_length" in step],
        "errors": max((step.get("tlt/errors", 0.0) for step in trained), default=0.0),
        "greedy": {row["input"]: row["output"] for row in greedy},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    arguments, extra = parser.parse_known_args()
    recipe, out = arguments.recipe.resolve(), arguments.out.resolve()
    arms = {name: run(recipe, out / name, arguments.steps, name == "tlt", extra) for name in ("stock", "tlt")}
    stock, tlt = arms["stock"], arms["tlt"]
    same = sum(stock["greedy"][prompt] == tlt["greedy"].get(prompt) for prompt in stock["greedy"])
    print(f"{recipe.name}: greedy answers equal: {same} of {len(stock['greedy'])}")
    for what in ("reward", "length"):
        parts = []
        for name, arm in arms.items():
            spread = statistics.stdev(arm[what]) / len(arm[what]) ** 0.5
            parts.append(f"{name} {statistics.mean(arm[what]):.3f} +- {spread:.3f}")
        print(f"  {what} over {len(stock[what])} steps: {', '.join(parts)} (mean, standard error over steps)")
    accepted = ", ".join(f"{value:.2f}" for value in tlt["accept_length"])
    print(f"  accept length by step with TLT: {accepted}; errors {tlt['errors']:.0f}")
    (out / "drop_in.json").write_text(json.dumps(arms))


if __name__ == "__main__":
    main()
