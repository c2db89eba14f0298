"""How far the advisor's simulation is from what was measured: our own CPU runs, and the TLT paper's clusters.

    python -m benchmarks.simulate.residuals [--scale [REPLICAS]]

Nothing is timed but the simulation itself (`--scale`: 1,024 replicas and a million requests). Costs and lengths come
from stored results; what was fitted stands beside each comparison in benchmarks/results/simulator.json.

* `steps`: segments against an engine that is stepped through token by token.
* `same_tokens`: step costs fitted to the stock rollouts of the first pair of runs alone (seven rollouts, three numbers:
  a step beside a busy engine, one beside an idle one, each request); what drafting adds by the calibration of another
  engine (control.json). Predicted: the stock rollouts of the second pair, and every rollout with TLT, told its accept
  length. Response lengths and their replicas are those of the runs, drawn again from their seed.
* `drain`: step costs by that calibration, acceptance as held-out text had promised it, the machine's pace by the arm
  without drafts. Predicted: the speed of every other arm.
* `paper`: see `benchmarks.simulate.paper`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.control.engine import problems
from benchmarks.gpu.parts import machine
from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100, QWEN_32B_TP4, TableCost, calibration_of, steady
from benchmarks.simulate.paper import reproduce
from benchmarks.simulate.workload import FIG16_ADAPTIVE, Workload, geometric
from demo.toy.assets import prompt_row
from verl_tlt.advise.simulation import (
    EngineSpec,
    Floats,
    Lengths,
    LogNormal,
    SimulatedRun,
    decode,
    rollout,
    simulate,
    step_gains,
)
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.types import OFF

RESULTS = Path(__file__).parents[1] / "results"
PROMPTS, SAMPLES, LONGEST, PROMPT = 6, 4, 1400, 25
"""The demo's recipe: prompts of a step, responses to each, their longest, tokens of a prompt."""
ARMS = (0, 1, 2, 3, 5, 7)


# ---------------------------------------------------------------------- segments against steps


def against_steps() -> dict[str, Any]:
    """Seconds of segments over seconds of steps, for two models, three acceptances, with a queue and without."""
    ratios: dict[str, float] = {}
    for label, cost in (("8B", QWEN3_8B_H100), ("32B", QWEN_32B_TP4)):
        for a in (0.3, 0.6, 0.9):
            for requests, at_once in ((64, 256), (384, 128)):
                for policy in ("fixed", "goodput"):
                    w = Workload(requests, geometric(a), rollouts=2, max_batch=at_once)
                    stepped = make_policy(policy, ARMS)
                    stepped.set_latency(calibration_of(cost, ARMS))
                    stepped.set_acceptance(list(w.acceptance))
                    exact = SimulatedEngine(w, cost, Noise(0.03)).run(stepped).seconds
                    spec = EngineSpec(steady(cost), ARMS if policy == "goodput" else ARMS[-1:], max_batch=at_once)
                    gains = step_gains(spec, w.acceptance, requests)
                    ours = sum(decode(spec, w.rollout(i).lengths, w.prompt, gains).seconds for i in range(2))
                    ratios[f"{label} a={a} {requests} requests, {policy}"] = round(ours / exact, 4)
    return {"ratio": ratios, "worst": round(max(abs(r - 1.0) for r in ratios.values()), 4)}


# ---------------------------------------------------------------------- two runs on the same tokens


@dataclass(frozen=True)
class CpuCost:
    """A step of a toy engine on cores that two engines share; drafts cost what they cost in another engine."""

    step_s: float
    request_s: float
    drafting: TableCost

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step."""
        shares = [self._share(batch, k) for k in (verified if drafted != OFF else OFF, drafted)]
        return (self.step_s + self.request_s * batch) * 0.5 * sum(shares)

    def _share(self, batch: int, k: int) -> float:
        off = self.drafting.seconds(batch, 0, 0, OFF)
        return max(1.0, self.drafting.seconds(batch, 0, max(k, 0), k) / off)


def forced_lengths(step: int) -> list[Lengths]:
    """Lengths of a step's responses by replica, as the run on the same tokens forced them."""
    rng = random.Random("train 0")
    rows = [prompt_row(rng, "train", i) for i in range(PROMPTS * step)][-PROMPTS:]
    found: list[list[int]] = [[], []]
    for row in rows:
        info = row["extra_info"]
        for sample in range(SAMPLES):
            found[(info["index"] + sample) % 2].append(min(LONGEST, info["forced_lengths"][sample]))
    return [np.asarray(lengths) for lengths in found]


def fit_stock(rows: list[dict[str, float]]) -> Floats:
    """(seconds of a step beside a busy engine, beside an idle one, per request), least squares of relative errors."""
    table = []
    for row in rows:
        lengths = forced_lengths(int(row["step"]))
        longest = max(lengths, key=np.max)
        both = min(int(x.max()) for x in lengths)
        table.append(np.array([both, longest.max() - both, longest.sum()]) / row["stock_rollout_s"])
    return np.linalg.lstsq(np.array(table), np.ones(len(rows)), rcond=None)[0].astype(np.float64)


def when_both_are_done(seconds: list[float], busy_s: float, alone_s: float) -> float:
    """When the later of two engines is done, which decodes faster once the other has ended."""
    first, last = sorted(seconds)
    return first + (last - first) * alone_s / busy_s


def one_acceptance(accept_length: float, longest: int) -> tuple[float, ...]:
    """The same acceptance at every position that gives this accept length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        a = 0.5 * (low + high)
        low, high = (a, high) if sum(a**i for i in range(longest + 1)) < accept_length else (low, a)
    return (low,) * longest


def same_tokens() -> dict[str, Any]:
    """Predictions against benchmarks/results/same_tokens.json."""
    measured = json.loads((RESULTS / "same_tokens.json").read_text())
    control = json.loads((RESULTS / "control.json").read_text())["drain_detail"]
    busy_s, alone_s, request_s = fit_stock(measured["fresh"]["steps"])
    cost = CpuCost(busy_s, request_s, TableCost(LatencyTable.from_list(control["calibration"])))
    found: dict[str, Any] = {"fitted_ms": [round(1e3 * float(x), 2) for x in (busy_s, alone_s, request_s)]}
    arms = {
        "stock": ("fresh", True),
        "stock, second pair": ("warm", True),
        "warm": ("warm", False),
        "fresh": ("fresh", False),
    }
    for arm, (pair, plain) in arms.items():
        spec, rng = EngineSpec(steady(cost), (0, 1, 2, 3), max_batch=32), np.random.default_rng(0)
        rows = []
        for row in measured[pair]["steps"]:
            acceptance = one_acceptance(row["accept_length"], 3)
            pairs = [rollout(spec, x, PROMPT, acceptance, rng) for x in forced_lengths(int(row["step"]))]
            done = [(stock if plain else tlt).seconds for stock, tlt in pairs]
            predicted = when_both_are_done(done, busy_s + request_s, alone_s + request_s)
            seconds = row["stock_rollout_s" if plain else "rollout_s"]
            rows.append({"step": row["step"], "measured_s": round(seconds, 2), "predicted_s": round(predicted, 2)})
        whole = sum(r["predicted_s"] for r in rows) / sum(r["measured_s"] for r in rows)
        single = [r["predicted_s"] / r["measured_s"] for r in rows]
        found[arm] = {"fitted": arm == "stock", "ratio": round(whole, 3), "lowest": round(min(single), 3),
                      "highest": round(max(single), 3), "rollouts": rows}  # fmt: skip
    return found


# ---------------------------------------------------------------------- the drain


def drain() -> dict[str, Any]:
    """Predictions against the drain in benchmarks/results/control.json."""
    content = json.loads((RESULTS / "control.json").read_text())
    detail, measured = content["drain_detail"], content["drain"]["tok_per_s"]
    cost = TableCost(LatencyTable.from_list(detail["calibration"]))
    acceptance = tuple(detail["expected_acceptance"])
    speeds = {}
    for name in ["off", *(f"fixed-{k}" for k in range(1, 8)), "goodput"]:
        arms = (int(name.removeprefix("fixed-")),) if name.startswith("fixed-") else tuple(range(8))
        spec = EngineSpec(steady(cost), arms, max_batch=64)
        tokens = seconds = 0.0
        for seed in range(content["drain"]["runs"]):
            work = problems(seed)
            lengths, prompt = np.array([n for _, n in work]), round(float(np.mean([len(p) for p, _ in work])))
            gains = None if name == "off" else step_gains(spec, acceptance, lengths.size)
            seconds += decode(spec, lengths, prompt, gains).seconds
            tokens += float(lengths.sum())
        speeds[name] = tokens / seconds
    pace = measured["off"]["median"] / speeds["off"]
    rows = {
        name: {"measured": measured[name]["median"], "predicted": round(pace * speed, 1),
               "ratio": round(pace * speed / measured[name]["median"], 3)}
        for name, speed in speeds.items()
    }  # fmt: skip
    return {"pace": round(pace, 3), "tok_per_s": rows}


# ---------------------------------------------------------------------- size


def scale(replicas: int) -> dict[str, Any]:
    """How long a step of so many replicas, 1,024 requests each, takes to simulate."""
    engine, lengths = EngineSpec(steady(QWEN3_8B_H100), (0, 1, 3, 7)), LogNormal(2000, 1.0, 16384)
    run = SimulatedRun(engine, replicas, 1024 * replicas, lengths, FIG16_ADAPTIVE)
    begin = time.perf_counter()
    found = simulate(run)
    took = time.perf_counter() - begin
    return {
        "replicas": replicas,
        "requests": run.requests,
        "tokens": found.tokens,
        "seconds": round(took, 1),
        "rollout_ratio": round(found.speed, 3),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, nargs="?", const=1024, help="also simulate so many replicas: some minutes")
    parser.add_argument("--out", type=Path, default=RESULTS / "simulator.json")
    args = parser.parse_args()
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    found = {"machine": machine(), "steps": against_steps(), "same_tokens": same_tokens(), "drain": drain(),
             "paper": reproduce()}  # fmt: skip
    if args.scale:
        found["scale"] = scale(args.scale)
    elif "scale" in before:
        found["scale"] = before["scale"]
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "machine"}, indent=1))


if __name__ == "__main__":
    main()
