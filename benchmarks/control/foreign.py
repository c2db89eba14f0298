"""Replays on step costs that are not the formula which `goodput` fits, with seeds on which nothing was tuned.

Three kinds of costs: a roofline of which every draft length and octave of batch is off by a factor of its own (10 %),
one that computes in whole tiles of tokens, and tables that engines on three CPUs recorded, off by such factors too.
Calm: measured times jitter by 3 %. Rough: by 10 %, every fiftieth step stalls, the machine's clock swings by a tenth,
and acceptance drifts between rollouts and along responses. Otherwise as in `replay.py`, whose oracle O3 knows it all.

The rival that matters is a table by batch size which was told the true costs (its own measurements at every load) and
the first acceptance: vLLM's own kind of control, at its best.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.control.replay import DRIFT, EAGER_ARMS, RECORDED, Replay, contestants
from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100, QWEN_32B_TP4, CostModel, TableCost
from benchmarks.simulate.oracles import TrueGoodput, best_per_bucket, static_runs
from benchmarks.simulate.workload import FIG16_ADAPTIVE, Workload, geometric
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF

SEEDS = (201, 202, 203)
"""Of workload, noise and distortion: none of those that constants were chosen by."""
DISTORTION = 0.10
"""Standard deviation of the log of a factor."""
OCTAVES, LONGEST = 12, 8
CALM = Noise(0.03)
ROUGH = Noise(0.10, stall_chance=0.02, swing=0.10)
BARS = {"calm": 98.0, "rough": 97.0}
"""Percent of O3 that goodput promises."""
TABLES = {
    "bf16 CPU": RECORDED,
    "AVX2 CPU": Path(__file__).parent / "recorded_avx2.json",
    "study's CPU": Path(__file__).parents[1] / "results" / "drafter_study_costs.json",
}
"""Recorded by the drain, by a run of the end-to-end benchmark, and for the study of the drafter."""


@dataclasses.dataclass(frozen=True)
class Distorted:
    """Steady steps of another cost model, each draft length and octave of batch off by a factor of its own.

    Between octaves the factor is linear in the logarithm of the batch. A step that changes K costs the mean of both
    steady ones.
    """

    inner: CostModel
    seed: int

    @cached_property
    def factors(self) -> npt.NDArray[np.float64]:
        """[draft length + 1, octave]."""
        rng = np.random.default_rng([self.seed, 7])
        return rng.lognormal(0.0, DISTORTION, (LONGEST + 2, OCTAVES))

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step."""
        steady = self._steady(batch, kv_tokens, drafted)
        if verified == max(drafted, 0):
            return steady
        return 0.5 * (steady + self._steady(batch, kv_tokens, verified))

    def _steady(self, batch: int, kv_tokens: int, k: int) -> float:
        row, octave = self.factors[k + 1], math.log2(batch)
        low = min(int(octave), OCTAVES - 2)
        factor = row[low] + (octave - low) * (row[low + 1] - row[low])
        return float(factor) * self.inner.seconds(batch, kv_tokens, max(k, 0), k)


@dataclasses.dataclass(frozen=True)
class Tiled:
    """Another cost model on hardware that computes whole tiles: the tokens it verifies are rounded up."""

    inner: CostModel
    tile: int

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step."""
        tokens = verified + 1
        padded = -(-batch * tokens // self.tile) * self.tile
        # The cost models take any number here; what they are given is requests.
        return self.inner.seconds(padded / tokens, kv_tokens, verified, drafted)  # type: ignore[arg-type]


def costs(seed: int) -> dict[str, tuple[CostModel, tuple[int, ...], Workload]]:
    """By name: costs, draft lengths, and a workload without drift."""
    found: dict[str, tuple[CostModel, tuple[int, ...], Workload]] = {}
    for b0 in (64, 256):
        for name, inner, acceptance in (("8B", QWEN3_8B_H100, geometric(0.7)), ("32B", QWEN_32B_TP4, FIG16_ADAPTIVE)):
            workload = Workload(b0, acceptance, seed=seed)
            found[f"{name} B0={b0} distorted"] = Distorted(inner, seed), EAGER_ARMS, workload
            found[f"{name} B0={b0} tiles of 64"] = Tiled(inner, 64), EAGER_ARMS, workload
    for name, path in TABLES.items():
        table = LatencyTable.from_list(json.loads(path.read_text())["points"])
        arms = tuple(k for k in table.arms() if k != OFF)
        workload = Workload(32, geometric(0.7), 10, median_length=120.0, length_sigma=1.0, max_length=1024, prompt=40,
                            seed=seed)  # fmt: skip
        found[f"{name} distorted"] = Distorted(TableCost(table), seed), arms, workload
    return found


def replays() -> list[Replay]:
    """All of them, calm and rough."""
    found = []
    for seed in SEEDS:
        for name, (cost, arms, workload) in costs(seed).items():
            moving = dataclasses.replace(workload, drift=DRIFT, age_drift=-0.1, request_sigma=0.08)
            found.append(Replay(f"{name}, calm", workload, cost, arms, CALM))
            found.append(Replay(f"{name}, rough", moving, cost, arms, ROUGH, stationary=False))
    return found


def score(replay: Replay) -> dict[str, Any]:
    """Speed in percent of O3: goodput, the informed table, and the best that hindsight allows."""
    engine = SimulatedEngine(replay.workload, replay.cost, replay.noise)
    oracle = engine.run(TrueGoodput(replay.arms)).seconds
    static, told = static_runs(engine, replay.arms), contestants(replay)
    seconds = {name: engine.run(told[name]).seconds for name in ("goodput", "table")}
    seconds["best K"] = min(run.seconds for run in static.values())
    seconds["best K per octave"] = engine.run(best_per_bucket(static)).seconds
    return {
        "name": replay.name,
        "seed": replay.workload.seed,
        "kind": "calm" if replay.stationary else "rough",
        "pct_of_oracle": {name: round(100 * oracle / value, 2) for name, value in seconds.items()},
    }


def run_all(say: Callable[[str], None], jobs: int = 1) -> dict[str, Any]:
    """Run all; `say` is called with a line per replay.

    Returns:
        `foreign`: what `score` says of each.
    """
    found = []
    with ProcessPoolExecutor(jobs) as pool:
        for row in pool.map(score, replays()):
            found.append(row)
            of = row["pct_of_oracle"]
            missed = "" if of["goodput"] >= BARS[row["kind"]] else f", wanted {BARS[row['kind']]}"
            say(f"{row['name']}, seed {row['seed']}: {of}{missed}")
    return {"foreign": found}
