"""Replays: every speculation policy against oracles on simulated rollouts that drain from B0 requests to one.

    python benchmarks/control/replay.py [--out FILE] [--only SUBSTRING] [--table FILE]

Prints one line per replay: makespan of the oracle O3 (argmax of true accept length over true latency, every step) and
every policy's speed in percent of it; then the checks of goodput. Every policy starts cold in every replay and keeps
what it learns from rollout to rollout; only `table` is given measured latencies and the drafter's acceptance, which
is what it is made of.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from verl_tlt.control.base import BasePolicy
from verl_tlt.control.policy import make_policy
from verl_tlt.control.tables import LatencyPoint, LatencyTable
from verl_tlt.control.types import OFF, Load, StepRecord
from verl_tlt.simulate.engine import Noise, Run, SimulatedEngine
from verl_tlt.simulate.hardware import QWEN3_8B_H100, QWEN_32B_TP4, VLLM_CAPTURE, CostModel, SwitchCost, TableCost
from verl_tlt.simulate.oracles import TrueGoodput, best_per_bucket, static_runs
from verl_tlt.simulate.workload import FIG16_ADAPTIVE, FIG16_VANILLA, Workload, geometric

EAGER_ARMS = (0, 1, 2, 3, 5, 7)
GRAPH_ARMS = (0, 1, 3)
"""Draft lengths with CUDA graphs on vLLM 0.24."""
DRIFT = (0.0, -0.10, -0.04, 0.06, 0.0, -0.08)
"""Relative acceptance over six rollouts: falls and recovers as policy and drafter are updated."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """One simulated run."""

    name: str
    workload: Workload
    cost: CostModel
    arms: tuple[int, ...] = EAGER_ARMS
    noise: Noise = dataclasses.field(default_factory=Noise)
    lag: int = 0
    stationary: bool = True
    """Whether costs and acceptance stay what they are."""


def replays() -> list[Replay]:
    """The suite: two models, five to two acceptances, two batch sizes; then drift, noise, cliffs, joins, lag."""
    found = []
    for b0 in (64, 256):
        for a in (0.0, 0.3, 0.6, 0.75, 0.9):
            found.append(Replay(f"8B B0={b0} a={a}", Workload(b0, geometric(a)), QWEN3_8B_H100))
        for label, acceptance in (("vanilla", FIG16_VANILLA), ("adapted", FIG16_ADAPTIVE)):
            found.append(Replay(f"32B-TP4 B0={b0} {label}", Workload(b0, acceptance), QWEN_32B_TP4))
        moving = Workload(b0, geometric(0.7), drift=DRIFT, age_drift=-0.1, request_sigma=0.08)
        found.append(Replay(f"8B B0={b0} drift", moving, QWEN3_8B_H100, stationary=False))
        found.append(Replay(f"32B-TP4 B0={b0} drift", moving, QWEN_32B_TP4, stationary=False))
        shaky = Noise(0.10, stall_chance=0.02)
        found.append(Replay(f"8B B0={b0} noisy", Workload(b0, geometric(0.7)), QWEN3_8B_H100, noise=shaky))
        swing = dataclasses.replace(shaky, swing=0.25)
        found.append(
            Replay(f"8B B0={b0} throttling", Workload(b0, geometric(0.7)), QWEN3_8B_H100, noise=swing, stationary=False)
        )
    woken = Workload(128, geometric(0.7), drift=(-1.0, -1.0, -0.6, 0.0, 0.0, 0.0))
    found.append(Replay("8B B0=128 drafter wakes up", woken, QWEN3_8B_H100, stationary=False))
    cliff = dataclasses.replace(QWEN3_8B_H100, extra_s={0: 1.0e-3, 1: 1.0e-3})
    found.append(Replay("8B B0=128 graphs {0,1,3}", Workload(128, geometric(0.7)), cliff, GRAPH_ARMS))
    padded = dataclasses.replace(QWEN3_8B_H100, sharpness=8.0, capture=VLLM_CAPTURE[::2], eager_s=2.0e-3)
    found.append(Replay("8B B0=256 padded graphs to 512", Workload(256, geometric(0.7)), padded))
    queue = Workload(384, geometric(0.7), max_batch=128)
    found.append(Replay("8B B0=384 queue, 128 at once", queue, QWEN3_8B_H100, lag=1))
    thrash = SwitchCost(QWEN3_8B_H100, 5e-3)
    found.append(Replay("8B B0=128 switch costs 5 ms", Workload(128, geometric(0.6)), thrash, lag=1))
    return found


def measured_table(replay: Replay, seed: int = 5) -> LatencyTable:
    """What calibration at start would measure: medians of nine steps at powers of two, middling context."""
    rng = np.random.default_rng(seed)
    points = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for k in (OFF, *replay.arms):
            kv_tokens = batch * 1000
            true = replay.cost.seconds(batch, kv_tokens, max(k, 0), k)
            seconds = float(np.median(true * rng.lognormal(0.0, replay.noise.sigma, 9)))
            points.append(LatencyPoint(batch, kv_tokens, k, seconds, 9))
    return LatencyTable(tuple(points))


def contestants(replay: Replay) -> dict[str, BasePolicy]:
    """Every adaptive policy, cold."""
    policies = {name: make_policy(name, replay.arms) for name in ("table", "ema", "beg", "goodput")}
    policies["table"].set_latency(measured_table(replay))
    policies["table"].set_acceptance(list(replay.workload.acceptance))
    return policies


def compare(replay: Replay) -> dict[str, Any]:
    """Run everything on one replay.

    Returns:
        name, oracle_s and, per policy, pct_of_oracle and worst_bucket_vs_off (speed over the engine's own K=0 in the
        worst octave of batch sizes); under "detail" what the printed table adds.
    """
    engine = SimulatedEngine(replay.workload, replay.cost, replay.noise, observe_lag=replay.lag)
    oracle = engine.run(TrueGoodput(replay.arms)).seconds
    static = static_runs(engine, replay.arms)
    runs: dict[str, Run] = {f"fixed-{k}" if k else "off": run for k, run in static.items()}
    policies = contestants(replay)
    for name, policy in policies.items():
        runs[name] = engine.run(policy)
    per_bucket = engine.run(best_per_bucket(static))
    best_static = max(static, key=lambda k: oracle / static[k].seconds)
    return {
        "name": replay.name,
        "oracle_s": round(oracle, 3),
        "policies": {name: _score(run, oracle) for name, run in runs.items()},
        "detail": {
            "stationary": replay.stationary,
            "arms": list(replay.arms),
            "O1": f"fixed-{best_static}" if best_static else "off",
            "O2_pct": round(100 * oracle / per_bucket.seconds, 2),
            "goodput_worst_bucket_vs_stock": round(runs["goodput"].worst_bucket_vs_stock(), 3),
            "goodput_switches_per_1000": round(1000 * runs["goodput"].switches / runs["goodput"].steps, 1),
            "goodput": policies["goodput"].summary(),
        },
    }


def _score(run: Run, oracle: float) -> dict[str, float]:
    return {
        "pct_of_oracle": round(100 * oracle / run.seconds, 2),
        "worst_bucket_vs_off": round(run.worst_bucket_vs_off(), 3),
    }


def control_cost_us(batch: int = 256, steps: int = 4000) -> dict[str, float]:
    """CPU microseconds of goodput's choose and of choose + observe per engine step, over two draining batches."""
    policy = make_policy("goodput", EAGER_ARMS)
    rng = np.random.default_rng(0)
    choose_us, both_us, before = [], [], 0
    for step in [*range(steps), *range(steps)]:
        now = max(1, batch - step * batch // steps)
        load = Load(now, now * (300 + step))
        start = time.thread_time()
        k = policy.choose(load)
        chosen = time.thread_time()
        survivors = np.cumprod(np.full(before, 0.7)) * now
        seconds = QWEN3_8B_H100.seconds(now, load.kv_tokens, before, k) * rng.lognormal(0.0, 0.03)
        accepted = tuple(int(n) for n in survivors)
        record = StepRecord(
            now, load.kv_tokens, k, before, now if before else 0, accepted, now + sum(accepted), seconds, k == before
        )
        resumed = time.thread_time()
        policy.observe(record)
        choose_us.append(1e6 * (chosen - start))
        both_us.append(1e6 * (chosen - start + time.thread_time() - resumed))
        before = k
    return {
        "choose_us_p50": round(float(np.percentile(choose_us, 50)), 1),
        "choose_us_p99": round(float(np.percentile(choose_us, 99)), 1),
        "overhead_us_p50": round(float(np.percentile(both_us, 50)), 1),
        "overhead_us_p99": round(float(np.percentile(both_us, 99)), 1),
    }


def misses(result: dict[str, Any]) -> list[str]:
    """Which of goodput's promises one replay breaks, in words."""
    scores = {name: score["pct_of_oracle"] for name, score in result["policies"].items()}
    mine, worst = scores["goodput"], result["policies"]["goodput"]["worst_bucket_vs_off"]
    bar = 99.0 if result["detail"]["stationary"] else 98.0
    found = [f"{mine} % of O3, wanted {bar}"] if mine < bar else []
    if worst < 0.97:
        found.append(f"worst bucket {worst}x of K=0")
    rivals = {result["detail"]["O1"], "ema", "beg"}
    found += [f"behind {name} ({scores[name]} > {mine})" for name in sorted(rivals) if scores[name] > mine]
    return found


def show(result: dict[str, Any]) -> None:
    """One line of the table."""
    scores = {name: score["pct_of_oracle"] for name, score in result["policies"].items()}
    detail = result["detail"]
    names = ("off", detail["O1"], "table", "ema", "beg", "goodput")
    columns = " ".join(f"{scores[name]:7.2f}" for name in names)
    worst = result["policies"]["goodput"]["worst_bucket_vs_off"]
    print(
        f"{result['name']:32s} {result['oracle_s']:8.1f} {columns} {detail['O2_pct']:7.2f} "
        f"{worst:6.2f} {detail['goodput_switches_per_1000']:6.1f}  {detail['O1']:8s} {'; '.join(misses(result))}",
        flush=True,
    )


def main() -> dict[str, Any]:
    """Run the suite; returns what it writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--only", default="", help="run only replays whose name contains this")
    parser.add_argument("--table", type=Path, help="also replay a recorded latency table (a file of the store)")
    options = parser.parse_args()
    suite = replays()
    if options.table:
        table = LatencyTable.from_list(json.loads(options.table.read_text())["points"])
        arms = tuple(k for k in table.arms() if k != OFF)
        largest = max(p.batch for p in table.points)
        for a in (0.3, 0.6, 0.8):
            name = f"recorded {options.table.stem[:12]} a={a}"
            suite.append(Replay(name, Workload(largest, geometric(a)), TableCost(table), arms))
    head = ("off", "O1", "table", "ema", "beg", "goodput", "O2")
    columns = " ".join(f"{h:>7s}" for h in head)
    print(f"{'speed in % of O3':32s} {'O3, s':>8s} {columns} {'worst':>6s} {'sw/1k':>6s}  O1 is    misses")
    results = []
    for replay in suite:
        if options.only in replay.name:
            results.append(compare(replay))
            show(results[-1])
    cost = control_cost_us()
    print("control cost per step: " + ", ".join(f"{key} {value}" for key, value in cost.items()))
    out = {
        "replay": [{key: r[key] for key in ("name", "oracle_s", "policies")} for r in results],
        "replay_detail": {r["name"]: r["detail"] | {"misses": misses(r)} for r in results},
        **cost,
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(out, indent=1) + "\n")
    return out


if __name__ == "__main__":
    main()
