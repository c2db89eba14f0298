"""Rollout with TLT against stock verl, on the same tokens.

    python -m benchmarks.demo.same_tokens --steps 8

Two pairs of runs of the demo's recipe: stock verl (without the flag) beside `fresh`, which starts TLT from a random
drafter, and stock verl beside `warm`, which starts from the drafter that `fresh` has trained. The two runs of a pair
are alive at once and take turns after every step (`take_turns.py`), so that a machine that changes its speed changes
it for both; ratios are taken step by step. All decode the same tokens: the same prompts in the same order, response
lengths forced to the same draws of the task's own long-tailed distribution, each response on the same replica (verl's
router places them at random), and a learning rate of 0, so that the policy stays what it is. The first step (first use
of everything) is discarded. The stock run of the second pair against that of the first (`machine_drift`) says how far
runs that do not take turns would have been apart.

Two runs at once need 24 GB of memory, and a little swap or `RAY_memory_monitor_refresh_ms=0` if there is no more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.demo.take_turns import give
from benchmarks.stored import store
from demo.machine import find_dtype, say_dtype
from demo.toy.assets import build_assets, demo_width

RECIPE = Path(__file__).parents[2] / "demo" / "demo_grpo.sh"
Steps = dict[int, dict[str, float]]


def start(name: str, other: str, out: Path, steps: int, drafter: Path | None) -> subprocess.Popen[bytes]:
    """One run of a pair; `drafter` is what TLT starts from, where the run has it."""
    assets = build_assets(out / "assets", width=demo_width(find_dtype()))
    target = out / name
    target.mkdir(parents=True, exist_ok=True)
    for left in ("metrics.jsonl", "../turns/ready-" + name, "../turns/waited-" + name):
        (target / left).unlink(missing_ok=True)
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OUT": str(target),
        "ASSETS": str(out / "assets"),
        "POLICY": str(assets.policy),
        "STEPS": str(steps),
        "DTYPE": find_dtype(),
        "TLT": "0" if name.startswith("stock") else "1",
        "DRAFTER": str(drafter or ""),
        "SAVE_FREQ": "-1",
        "MALLOC_ARENA_MAX": "2",
    }
    overrides = [
        "data.shuffle=False",
        f"data.custom_cls.path={Path(__file__).with_name('take_turns.py')}",
        "data.custom_cls.name=TakeTurns",
        f"+data.turns={out / 'turns'}",
        f"+data.name={name}",
        f"+data.other={other}",
        "actor_rollout_ref.actor.optim.lr=0",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={assets.agent_loop}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forced_length",
        f"actor_rollout_ref.rollout.router_config_path={assets.router}",
        # Two runs in the memory of one machine: 51,200 tokens of KV cache an engine, more than a whole step decodes.
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=400",
    ]
    with (target / "verl.log").open("w") as log:
        return subprocess.Popen([str(RECIPE), *overrides], env=env, stdout=log, stderr=subprocess.STDOUT)


def read(name: str, out: Path) -> Steps:
    """verl's metrics by step; the time a run waited for its turn is no part of its steps."""
    lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    waited = [float(line) for line in (out / "turns" / f"waited-{name}").read_text().splitlines()]
    found: Steps = {line["step"]: line["data"] for line in lines}
    for step, seconds in zip(sorted(found), waited, strict=True):
        found[step]["timing_s/step"] -= seconds
    return found


def pair(tlt: str, out: Path, steps: int, drafter: Path | None) -> tuple[Steps, Steps]:
    """Stock verl and an arm with TLT, taking turns."""
    stock = f"stock-beside-{tlt}"
    (out / "turns").mkdir(parents=True, exist_ok=True)
    give(out / "turns", stock)
    running = {stock: start(stock, tlt, out, steps, None), tlt: start(tlt, stock, out, steps, drafter)}
    try:
        while running:
            time.sleep(0.2)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode:
                    raise SystemExit(f"{name} failed; see {out / name / 'verl.log'}")
                for left in running:
                    give(out / "turns", left)
    finally:
        for process in running.values():
            process.terminate()
    return read(stock, out), read(tlt, out)


def compare(stock: Steps, tlt: Steps) -> list[dict[str, float]]:
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
                "saved_s": t.get("tlt/saved_s"),
                "overhead_s": t["tlt/overhead_s"],
            }
        )
    return rows


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    """Run both pairs and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out/same-tokens"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--drafter", type=Path, help="start `warm` from this one, and leave `fresh` out")
    args = parser.parse_args()
    out = args.out.resolve()
    print(say_dtype(find_dtype()))
    pairs = {} if args.drafter else {"fresh": pair("fresh", out, args.steps, None)}
    pairs["warm"] = pair("warm", out, args.steps, (args.drafter or out / "fresh" / "drafter").resolve())
    result: dict[str, object] = {"dtype": find_dtype()}
    if "fresh" in pairs:
        first, again = pairs["fresh"][0], pairs["warm"][0]
        drift = [again[step]["timing_s/gen"] / first[step]["timing_s/gen"] for step in sorted(first)[1:]]
        result["machine_drift"] = spread(drift)
        print("the second pair's stock over the first's:", {k: round(v, 2) for k, v in spread(drift).items()})
    for name, (stock, tlt) in pairs.items():
        rows = compare(stock, tlt)
        for row in rows:
            print(name, json.dumps({k: round(v, 3) for k, v in row.items()}))
        ratios = {
            key: spread([row[key] for row in rows]) for key in ("rollout_ratio", "step_ratio", "stock_rollout_share")
        }
        result[name] = {**ratios, "steps": rows}
        print(name, {key: {k: round(v, 2) for k, v in ratio.items()} for key, ratio in ratios.items()})
    store(out / "same_tokens.json", result)


if __name__ == "__main__":
    main()
