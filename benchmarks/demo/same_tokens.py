"""Rollout with a trained drafter against stock verl, on the same tokens.

    python benchmarks/demo/same_tokens.py demo-out/tlt/drafter

Both arms run the demo's recipe with the same prompts in the same order, response lengths forced to the same draws of
the task's own long-tailed distribution, and a learning rate of 0, so that every step decodes the same number of tokens
with the same policy. The first step (first use of everything) is discarded; the ratio is taken step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from verl_tlt.toy.assets import build_assets

PROMPTS, SAMPLES = 6, 24
"""Prompts and responses a step: fewer than the demo's, so that rollout is 65-70 % of the stock step."""

RECIPE = Path(__file__).parents[2] / "recipes" / "demo_grpo.sh"


def run(arm: str, out: Path, steps: int, drafter: Path | None) -> dict[int, dict[str, float]]:
    """One arm; verl's metrics by step."""
    assets = build_assets(out / "assets", width="wide")
    target = out / arm
    target.mkdir(parents=True, exist_ok=True)
    metrics = target / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OUT": str(target),
        "ASSETS": str(out / "assets"),
        "POLICY": str(assets.policy),
        "STEPS": str(steps),
        "TLT": "0" if arm == "stock" else "1",
        "DRAFTER": str(drafter or ""),
        "SAVE_FREQ": "-1",
    }
    overrides = [
        "data.shuffle=False",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=0",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={assets.agent_loop}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forced_length",
    ]
    with (target / "verl.log").open("w") as log:
        subprocess.run([str(RECIPE), *overrides], env=env, stdout=log, stderr=subprocess.STDOUT, check=True)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines}


def main() -> None:
    """Run the arms one after the other and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path, help="a drafter directory, e.g. demo-out/tlt/drafter")
    parser.add_argument("--out", type=Path, default=Path("demo-out/same-tokens"))
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    out = args.out.resolve()
    arms = {
        "stock": run("stock", out, args.steps, None),
        "warm": run("warm", out, args.steps, args.drafter.resolve()),
    }
    rows = []
    for step in range(2, args.steps + 1):
        stock, warm = arms["stock"][step], arms["warm"][step]
        if stock["response_length/mean"] != warm["response_length/mean"]:
            raise SystemExit(f"Step {step} decoded different tokens in the two arms; the comparison is void.")
        rows.append(
            {
                "step": step,
                "tokens": stock["response_length/mean"] * SAMPLES,
                "stock_rollout_s": stock["timing_s/gen"],
                "warm_rollout_s": warm["timing_s/gen"],
                "rollout_ratio": stock["timing_s/gen"] / warm["timing_s/gen"],
                "step_ratio": stock["timing_s/step"] / warm["timing_s/step"],
                "stock_rollout_share": stock["timing_s/gen"] / stock["timing_s/step"],
                "accept_length": warm["tlt/accept_length"],
                "draft_length_mean": warm["tlt/draft_length_mean"],
                "saved_s": warm.get("tlt/saved_s"),
                "stolen_s": warm["tlt/stolen_s"],
            }
        )
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}))
    ratios = sorted(row["rollout_ratio"] for row in rows)
    summary = {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]}
    print(f"rollout {summary['median']:.2f}x (steps: {summary['min']:.2f} to {summary['max']:.2f})")
    (out / "same_tokens.json").write_text(json.dumps({"rollout_ratio": summary, "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
