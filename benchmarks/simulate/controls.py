"""What control rollouts cost, and how right `tlt/saved_s` is with them: simulated runs at recorded step costs.

    python -m benchmarks.simulate.controls [--steps N]

Two replicas with devices of their own decode `N` rollouts of 32 responses each at the step costs of a real CPU engine
(benchmarks/control/recorded_cpu.json), with its jitter. `warm` has the drafter of that recording from the first step,
`fresh` one whose acceptance rises to it over the first 24 steps. Everybody waits for the slower replica. Each rule is
compared with the same responses decoded without a drafter: seconds saved in truth and by the account. Writes
benchmarks/results/control_rollouts.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.control.replay import RECORDED
from benchmarks.gpu.parts import machine
from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import TableCost, calibration_of
from benchmarks.simulate.workload import Workload
from verl_tlt.config import SpeculationConfig
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.policies import TablePolicy
from verl_tlt.speculation.step_statistics import Aggregates, StepTotals
from verl_tlt.speculation.types import OFF, Load, Policy, StepRecord
from verl_tlt.trainer.speculation_control import SpeculationControl

RESULTS = Path(__file__).parents[1] / "results" / "control_rollouts.json"
REPLICAS, ARMS = ("a", "b"), (0, 1, 2, 3, 5, 7)
RULES = {"one in 32": 32, "early, then rarely": None, "never": 0}
"""`tlt.speculation.control_every`."""
RUNS = {"warm": 1, "fresh": 24}
"""Steps in which the drafter's acceptance rises to the recorded one."""
LOAD = Workload(32, (), 1, median_length=100.0, length_sigma=1.0, max_length=512, prompt=40)
"""Of one replica in a rollout."""


@dataclass
class Engine:
    """A policy, or the drafter OFF (`policy` None), whose steps are summed as an engine sums them."""

    policy: Policy | None
    clock: float
    sums: Aggregates = field(default_factory=Aggregates)

    def choose(self, load: Load) -> int:
        """K of the coming step."""
        return OFF if self.policy is None else self.policy.choose(load)

    def observe(self, step: StepRecord) -> None:
        """Take note of a step."""
        self.clock += step.latency_s
        self.sums.add(step, StepTotals(step.produced, step.verified * step.num_drafts, self.clock))


def decode(workload: Workload, cost: TableCost, noise: Noise, policy: Policy | None) -> tuple[float, EngineStats]:
    """One replica's rollout: true seconds, and what its engine says of it."""
    engine = Engine(policy, 1000.0)
    seconds = SimulatedEngine(workload, cost, noise).run(engine).seconds
    return seconds, engine.sums.stats()


def simulate(steps: int) -> dict[str, Any]:
    """Rollout seconds of both runs by rule, what each saved in truth and what the account says."""
    content = json.loads(RECORDED.read_text())
    cost, noise = TableCost(LatencyTable.from_list(content["points"])), Noise(content["jitter"], stall_chance=0.01)
    calibration = calibration_of(cost, ARMS)
    lives = {(run, rule): control(every, calibration) for run in RUNS for rule, every in RULES.items()}
    found = {key: {"rollout_s": 0.0, "truth_s": 0.0, "claimed_s": 0.0, "control_rollouts": 0} for key in lives}
    for step in range(1, steps + 1):
        loads = [replace(LOAD, seed=2 * step + i) for i in range(len(REPLICAS))]
        stock = [decode(load, cost, noise, None) for load in loads]
        for run, rise in RUNS.items():
            acceptance = tuple(a * min(1.0, step / rise) for a in content["acceptance"])
            policy = TablePolicy(ARMS)
            policy.set_latency(calibration)
            policy.set_acceptance(acceptance)
            drafted = [decode(replace(load, acceptance=acceptance), cost, noise, policy) for load in loads]
            for rule in RULES:
                live, row = lives[run, rule], found[run, rule]
                off = live.undrafted(step, acceptance)
                each = [stock[i] if name in off else drafted[i] for i, name in enumerate(REPLICAS)]
                rollout_s = max(seconds for seconds, _ in each)
                saved_s = live.rollout_ended({name: stats for name, (_, stats) in zip(REPLICAS, each, strict=True)})
                row["rollout_s"] += rollout_s
                row["control_rollouts"] += bool(live.control)
                if saved_s is not None:  # truth and claim are of the same rollouts
                    row["truth_s"] += max(seconds for seconds, _ in stock) - rollout_s
                    row["claimed_s"] += saved_s
    return {
        f"{run}, {rule}": {key: round(value, 1) for key, value in row.items()} for (run, rule), row in found.items()
    }


def control(every: int | None, calibration: LatencyTable) -> SpeculationControl:
    """The trainer's decisions under a rule."""
    live = SpeculationControl("/nonexistent", REPLICAS, SpeculationConfig(control_every=every))
    live.calibrated(calibration)
    return live


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    found = {"machine": machine(), "steps": options.steps, **simulate(options.steps)}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
