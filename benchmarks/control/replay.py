"""Replays: `live_table` against oracles on simulated rollouts that drain from B0 requests to one.

Speed is the makespan of the oracle (argmax of true accept length over true latency, every step) in percent of a
policy's. Each fixed K is replayed, too; which one is best is known in hindsight only. `live_table` keeps what it learns
from rollout to rollout. As in a run, it is told a noisy calibration (`server/calibration.py`) and the acceptance that
the drafter was published with, which drift then leaves behind. It is replayed with five seeds of workload and noise.
"""

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100, QWEN_32B_TP4, VLLM_CAPTURE, CostModel, SwitchCost, TableCost
from benchmarks.simulate.oracles import TrueSpeed, fixed_runs
from benchmarks.simulate.workload import FIG16_ADAPTIVE, FIG16_VANILLA, Workload, geometric
from verl_tlt.server.calibration import STEPS, plan_loads
from verl_tlt.speculation.costs import SHORT_CONTEXT, LatencyPoint, LatencyTable
from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.types import OFF, Policy

EAGER_ARMS = (0, 1, 2, 3, 5, 7)
RECORDED = Path(__file__).parent / "recorded_cpu.json"
"""Step times and acceptance of a real engine on two CPU cores, measured with commit 7ae83526."""
GRAPH_LENGTHS = (0, 1, 3)
"""Draft lengths with CUDA graphs on vLLM 0.24."""
OURS = "live_table"
OTHER_SEEDS = (1, 2, 3, 4)
"""Of workload and noise, under which `live_table` has to keep its promise as well; one seed may be a lucky one."""
LEAST = 97.5
"""Percent of the oracle's speed that `live_table` reaches in every replay with every seed."""
CACHE_TOKENS = 400_000
"""Tokens that the KV cache of the simulated engines holds."""
DRIFT = (0.0, -0.10, -0.04, 0.06, 0.0, -0.08)
"""Relative acceptance over six rollouts: falls and recovers as policy and drafter are updated."""


@dataclasses.dataclass(frozen=True)
class Replay:
    name: str
    workload: Workload
    cost: CostModel
    arms: tuple[int, ...] = EAGER_ARMS
    noise: Noise = dataclasses.field(default_factory=Noise)
    lag: int = 0

    @property
    def largest_batch(self) -> int:
        return min(self.workload.requests, self.workload.max_batch)


def replays() -> list[Replay]:
    """The suite: two models, five to two acceptances, two batch sizes; then drift, noise, cliffs, joins, lag."""
    found = []
    for b0 in (64, 256):
        for a in (0.0, 0.3, 0.6, 0.75, 0.9):
            found.append(Replay(f"8B B0={b0} a={a}", Workload(b0, geometric(a)), QWEN3_8B_H100))
        for label, acceptance in (("vanilla", FIG16_VANILLA), ("adapted", FIG16_ADAPTIVE)):
            found.append(Replay(f"32B-TP4 B0={b0} {label}", Workload(b0, acceptance), QWEN_32B_TP4))
        moving = Workload(b0, geometric(0.7), drift=DRIFT, age_drift=-0.1, request_sigma=0.08)
        found.append(Replay(f"8B B0={b0} drift", moving, QWEN3_8B_H100))
        found.append(Replay(f"32B-TP4 B0={b0} drift", moving, QWEN_32B_TP4))
        shaky = Noise(0.10, stall_chance=0.02)
        found.append(Replay(f"8B B0={b0} noisy", Workload(b0, geometric(0.7)), QWEN3_8B_H100, noise=shaky))
        swing = dataclasses.replace(shaky, swing=0.25)
        found.append(Replay(f"8B B0={b0} throttling", Workload(b0, geometric(0.7)), QWEN3_8B_H100, noise=swing))
    woken = Workload(128, geometric(0.7), drift=(-1.0, -1.0, -0.6, 0.0, 0.0, 0.0))
    found.append(Replay("8B B0=128 drafter wakes up", woken, QWEN3_8B_H100))
    cliff = dataclasses.replace(QWEN3_8B_H100, extra_s={0: 1.0e-3, 1: 1.0e-3})
    found.append(Replay("8B B0=128 graphs {0,1,3}", Workload(128, geometric(0.7)), cliff, GRAPH_LENGTHS))
    padded = dataclasses.replace(QWEN3_8B_H100, sharpness=8.0, capture=VLLM_CAPTURE[::2], eager_s=2.0e-3)
    found.append(Replay("8B B0=256 padded graphs to 512", Workload(256, geometric(0.7)), padded))
    queue = Workload(384, geometric(0.7), max_batch=128)
    found.append(Replay("8B B0=384 queue, 128 at once", queue, QWEN3_8B_H100, lag=1))
    thrash = SwitchCost(QWEN3_8B_H100, 5e-3)
    found.append(Replay("8B B0=128 switch costs 5 ms", Workload(128, geometric(0.6)), thrash, lag=1))
    return found


def calibration(replay: Replay, seed: int) -> LatencyTable:
    """What a run knows at its start: medians of a few noisy steps at the loads that a server measures."""
    rng = np.random.default_rng([5, seed])
    points = []
    loads = plan_loads(replay.largest_batch, replay.workload.max_length, CACHE_TOKENS)
    for load in sorted(loads, key=lambda load: load.context > SHORT_CONTEXT):
        for k in (OFF, *replay.arms):
            true = replay.cost.seconds(load.batch, load.kv_tokens, max(k, 0), k)
            seconds = float(np.median(true * rng.lognormal(0.0, replay.noise.sigma, STEPS)))
            points.append(LatencyPoint(load.batch, load.kv_tokens, k, seconds))
    return LatencyTable(tuple(points))


def contestant(replay: Replay, seed: int = 0) -> Policy:
    """`live_table`, told what a run would tell it."""
    policy = make_policy(OURS, replay.arms, replay.largest_batch)
    policy.set_costs(calibration(replay, seed))
    first = np.clip(np.asarray(replay.workload.acceptance) * (1.0 + replay.workload.drift[0]), 0.0, 1.0)
    policy.set_acceptance(first.tolist())
    return policy


def compare(replay: Replay) -> dict[str, Any]:
    """Run everything on one replay.

    Returns:
        name, oracle_s and, per policy, pct_of_oracle; under "detail" the best single K and the other seeds.
    """
    engine = SimulatedEngine(replay.workload, replay.cost, replay.noise, replay.lag)
    oracle_s = engine.run(TrueSpeed(replay.arms))
    fixed = fixed_runs(engine, replay.arms)
    seconds = fixed | {OURS: engine.run(contestant(replay))}
    return {
        "name": replay.name,
        "oracle_s": round(oracle_s, 3),
        "policies": {name: _score(of_policy, oracle_s) for name, of_policy in seconds.items()},
        "detail": {
            "best_single": min(fixed, key=lambda name: fixed[name]),
            "other_seeds": [_again(replay, seed) for seed in OTHER_SEEDS],
        },
    }


def _again(replay: Replay, seed: int) -> dict[str, float]:
    workload = dataclasses.replace(replay.workload, seed=seed)
    engine = SimulatedEngine(workload, replay.cost, replay.noise, replay.lag)
    oracle_s = engine.run(TrueSpeed(replay.arms))
    return _score(engine.run(contestant(replay, seed)), oracle_s)


def _score(seconds: float, oracle_s: float) -> dict[str, float]:
    return {"pct_of_oracle": round(100 * oracle_s / seconds, 2)}


def scores(result: dict[str, Any]) -> list[float]:
    """Percent of the oracle that `live_table` reached, by seed."""
    every = [result["policies"][OURS], *result["detail"]["other_seeds"]]
    return [score["pct_of_oracle"] for score in every]


def misses(result: dict[str, Any]) -> list[str]:
    """Which of `live_table`'s promises one replay breaks, in words."""
    found = [f"{min(scores(result))} % of the oracle, wanted {LEAST}"] if min(scores(result)) < LEAST else []
    of = {name: score["pct_of_oracle"] for name, score in result["policies"].items()}
    best = result["detail"]["best_single"]
    return found + ([f"behind {best} ({of[best]} > {of[OURS]})"] if of[best] > of[OURS] else [])


def suite() -> list[Replay]:
    """The synthetic replays, and those on step times of a real engine."""
    content = json.loads(RECORDED.read_text())
    table = LatencyTable.from_list(content["points"])
    arms = tuple(k for k in table.lengths() if k != OFF)
    noise = Noise(content["jitter"], stall_chance=0.01)
    lengths = {"median_length": 120.0, "length_sigma": 1.0, "max_length": 1024, "prompt": 40}
    cases = {"own": tuple(content["acceptance"]), "a=0.3": geometric(0.3), "a=0.6": geometric(0.6)}
    found = replays()
    for label, acceptance in cases.items():
        workload = Workload(64, acceptance, rollouts=10, **lengths)  # type: ignore[arg-type]
        found.append(Replay(f"CPU engine B0=64 {label}", workload, TableCost(table), arms, noise))
    return found


def run_all(say: Callable[[str], None], jobs: int) -> dict[str, Any]:
    """Run the suite in so many processes, since nothing is timed here; `say` is called with a line per replay."""
    results = []
    with ProcessPoolExecutor(jobs) as pool:
        for result in pool.map(compare, suite()):
            results.append(result)
            say(f"{result['name']}: {scores(result)} % of the oracle{''.join(f'; {miss}' for miss in misses(result))}")
    every = [score for result in results for score in scores(result)]
    say(f"{OURS}: worst {min(every)} %, median {np.median(every):.2f} % of the oracle")
    return {
        "replay": [{key: r[key] for key in ("name", "oracle_s", "policies")} for r in results],
        "replay_detail": {r["name"]: r["detail"] | {"misses": misses(r)} for r in results},
    }
