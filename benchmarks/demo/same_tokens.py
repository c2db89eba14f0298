"""Rollout with TLT against stock verl, on the same tokens.

    python benchmarks/demo/same_tokens.py --steps 8

Arms run the demo's recipe one after the other: `stock` is verl without the flag, `fresh` starts TLT from a random
drafter, `warm` starts from the drafter that `fresh` has trained, and `stock` runs once more: a step is compared with
the mean of both, and how far they differ (`machine_drift`) says what the ratios are worth on a machine that others use
too. All decode the same tokens: the same prompts in the same order, response lengths forced to the same draws of the
task's own long-tailed distribution, each response on the same replica (verl's router places them at random), and a
learning rate of 0, so that the policy stays what it is. The first step (first use of everything) is discarded, and
ratios are taken step by step.
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
        "TLT": "0" if arm.startswith("stock") else "1",
        "DRAFTER": str(drafter or ""),
        "SAVE_FREQ": "-1",
    }
    overrides = [
        "data.shuffle=False",
        "actor_rollout_ref.actor.optim.lr=0",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={assets.agent_loop}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forced_length",
        f"actor_rollout_ref.rollout.router_config_path={assets.router}",
    ]
    with (target / "verl.log").open("w") as log:
        subprocess.run([str(RECIPE), *overrides], env=env, stdout=log, stderr=subprocess.STDOUT, check=True)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines}


def mean_of(first: dict[int, dict[str, float]], again: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Two runs of the stock arm as one: what both logged, step by step."""
    return {
        step: {key: (value + again[step][key]) / 2 for key, value in data.items() if key in again[step]}
        for step, data in first.items()
    }


def compare(stock: dict[int, dict[str, float]], tlt: dict[int, dict[str, float]]) -> list[dict[str, float]]:
    """An arm with TLT against the stock one, a row for each step but the first."""
    rows = []
    for step in sorted(stock)[1:]:
        s, t = stock[step], tlt[step]
        if s["response_length/mean"] != t["response_length/mean"]:
            raise SystemExit(f"Step {step} decoded different tokens in the two arms; the comparison is void.")
        rows.append(
            {
                "step": step,
                "tokens_per_response": s["response_length/mean"],
                "stock_rollout_s": s["timing_s/gen"],
                "rollout_s": t["timing_s/gen"],
                "rollout_ratio": s["timing_s/gen"] / t["timing_s/gen"],
                "step_ratio": s["timing_s/step"] / t["timing_s/step"],
                "stock_rollout_share": s["timing_s/gen"] / s["timing_s/step"],
                "accept_length": t["tlt/accept_length"],
                "draft_length_mean": t["tlt/draft_length_mean"],
                "saved_s": t.get("tlt/saved_s", 0.0),
                "stolen_s": t["tlt/stolen_s"],
            }
        )
    return rows


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    """Run the arms one after the other and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out/same-tokens"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--drafter", type=Path, help="start `warm` from this one, and leave `fresh` out")
    args = parser.parse_args()
    out = args.out.resolve()
    first = run("stock", out, args.steps, None)
    fresh = None if args.drafter else run("fresh", out, args.steps, None)
    warm = run("warm", out, args.steps, (args.drafter or out / "fresh" / "drafter").resolve())
    again = run("stock-again", out, args.steps, None)
    stock = mean_of(first, again)
    drift = [again[step]["timing_s/gen"] / first[step]["timing_s/gen"] for step in sorted(first)[1:]]
    result = {
        "stock_rollout_share": spread([s["timing_s/gen"] / s["timing_s/step"] for s in list(stock.values())[1:]]),
        "machine_drift": spread(drift),
    }
    print("stock again over stock:", {name: round(value, 2) for name, value in result["machine_drift"].items()})
    for name, arm in (("fresh", fresh), ("warm", warm)):
        if arm is None:
            continue
        rows = compare(stock, arm)
        for row in rows:
            print(name, json.dumps({k: round(v, 3) for k, v in row.items()}))
        result[name] = {
            "rollout_ratio": spread([row["rollout_ratio"] for row in rows]),
            "step_ratio": spread([row["step_ratio"] for row in rows]),
            "steps": rows,
        }
        print(name, {k: {n: round(v, 2) for n, v in result[name][k].items()} for k in ("rollout_ratio", "step_ratio")})
    (out / "same_tokens.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
