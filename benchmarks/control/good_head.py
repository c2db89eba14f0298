"""A drafter that is nearly always right, at every load: is `goodput` behind the best fixed K of hindsight?

Each job is the first rollout of a run, which drains to one request in some hundred steps; goodput is told what a run
is told at its start. With such a drafter one long K is nearly best everywhere, so whatever else a policy tries is lost,
and nothing is left to win it back. Costs are those of engines on two CPUs and of simulated GPUs; seconds are pooled
over the jobs of a load.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.control.foreign import TABLES
from benchmarks.control.pairs import over
from benchmarks.control.replay import Replay, contestants
from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100, QWEN_32B_TP4, CostModel, TableCost
from benchmarks.simulate.oracles import static_runs
from benchmarks.simulate.workload import Workload, geometric
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.graph_rules import GRAPH_ARMS
from verl_tlt.speculation.types import OFF

ACCEPTANCE = (0.85, 0.93, 0.97)
"""Of the first position, 1 % less at each further one: 3.9, 5.5 and 6.6 tokens a step with drafts of 7."""
REQUESTS = (4, 16, 64)
SEEDS = tuple(range(401, 409))
"""Of the jobs of a load: none of those that constants were chosen by."""
NOISE = Noise(0.05, stall_chance=0.01)


def engines() -> dict[str, tuple[CostModel, tuple[int, ...], float]]:
    """By name: costs, draft lengths, and the median length of a response, in tokens."""
    found: dict[str, tuple[CostModel, tuple[int, ...], float]] = {
        "8B": (QWEN3_8B_H100, GRAPH_ARMS, 1500.0),
        "32B": (QWEN_32B_TP4, GRAPH_ARMS, 1500.0),
    }
    for name in ("bf16 CPU", "AVX2 CPU"):
        table = LatencyTable.from_list(json.loads(TABLES[name].read_text())["points"])
        found[name] = TableCost(table), tuple(k for k in table.arms() if k != OFF), 150.0
    return found


def jobs_of(engine: str, requests: int, a: float, seeds: Sequence[int] = SEEDS) -> list[Replay]:
    """The jobs of one load."""
    cost, arms, length = engines()[engine]
    shape: dict[str, Any] = {"median_length": length, "length_sigma": 0.8, "max_length": int(8 * length), "prompt": 40}
    works = [Workload(requests, geometric(a, 0.99), 1, seed=seed, **shape) for seed in seeds]
    return [Replay(f"{engine}, {requests} requests, a={a}", work, cost, arms, NOISE) for work in works]


def race(jobs: Sequence[Replay]) -> dict[str, Any]:
    """Goodput against every fixed K at one load.

    Returns:
        name; the best K over all jobs; how many times as fast goodput was, [ratio, low, high] (95 %).
    """
    seconds: list[dict[int, float]] = []
    ours: list[float] = []
    for job in jobs:
        engine = SimulatedEngine(job.workload, job.cost, job.noise)
        seconds.append({k: run.seconds for k, run in static_runs(engine, job.arms).items()})
        ours.append(engine.run(contestants(job)["goodput"]).seconds)
    best = min(jobs[0].arms, key=lambda k: sum(of[k] for of in seconds))
    return {"name": jobs[0].name, "best_k": best, "goodput_over_it": over([of[best] for of in seconds], ours)}


def run_all(say: Callable[[str], None], jobs: int = 1) -> dict[str, Any]:
    """Run all loads; `say` is called with a line for each.

    Returns:
        `good_head`: what `race` says of each.
    """
    found = []
    loads = [jobs_of(engine, requests, a) for engine in engines() for requests in REQUESTS for a in ACCEPTANCE]
    with ProcessPoolExecutor(jobs) as pool:
        for row in pool.map(race, loads):
            found.append(row)
            say(f"{row['name']}: {row['goodput_over_it']} times as fast as K={row['best_k']}")
    return {"good_head": found}
