"""RL end to end: stock verl, vLLM's own speculation and TLT, in turns, on a policy that learns.

    python -m benchmarks.e2e --out benchmarks/results/e2e.json [--rounds 3] [--steps 4] [--arms NAME ...]
    python -m benchmarks.e2e --forced --steps 8 --arms tlt-fresh tlt --work demo-out/forced --out FILE

Nine arms (`arms.py`), each a run of the demo's recipe with a policy of its own that really learns, on the same prompts
in the same order, sampled as in training. They take turns: in every round each arm goes on from its checkpoint for
`--steps` steps, in an order that rotates, so that a machine whose speed changes changes it for all. One job is alive at
a time; two would need more than 24 GB. The first step of a turn is left out (first use of everything), and so is the
time of the checkpoint, which only turns need. Speeds are ratios to stock's steps of the same round and number, all of
them pooled, with an interval (`pooled.py`).

The trained drafter was trained offline on demonstrations of the task, which are not the prompts here
(`benchmarks.control.toy`); step costs are measured once before (`verl-tlt calibrate`), for TLT and for `vllm-table`.

`--forced` makes a second table: every response has the length that its prompt's row says, on the same replica in every
arm, so that what `tlt/saved_s` claims can be compared with what was saved. Two rollouts of each turn are control
rollouts, decoded without drafts: an arm is faster than its ratio here.

The work folder keeps what was measured: called again, the command goes on with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.control.engine import VllmTable
from benchmarks.control.toy import LONGEST_DRAFT, prepare
from benchmarks.e2e.arms import STOCK, Arm, arms
from benchmarks.e2e.pooled import Step, ratios, summary
from benchmarks.e2e.turn import take
from benchmarks.gpu.parts import machine
from benchmarks.toy_job import RECIPE, recipe_environment
from demo.machine import find_dtype, say_dtype
from demo.processes import interruptible
from demo.toy.assets import Assets, build_assets, demo_width
from verl_tlt.speculation.costs.tables import LatencyTable

ROOT = Path(__file__).parents[2]
SEED = 1
"""Of the prompts: others than the demo's."""
REQUESTS = 32
"""`max_num_seqs` of the recipe."""


def calibrate(work: Path, assets: Assets, drafter: Path) -> tuple[Path, Path]:
    """What engine steps cost here, measured unless it was before: as measured, and where arms go on learning it."""
    calibrated, costs = work / "calibrated", work / "costs"
    if not list(calibrated.glob("*.json")):
        recipe = [str(RECIPE), f"tlt.speculation.max_draft_length={LONGEST_DRAFT}"]
        command = [
            str(Path(sys.executable).parent / "verl-tlt"),
            "calibrate",
            *recipe,
            "--cpu",
            "--out",
            str(calibrated),
        ]
        env = recipe_environment(work / "calibration", assets, 1, TLT="1", DRAFTER=str(drafter), DTYPE=find_dtype())
        subprocess.run(command, env=env, cwd=ROOT, check=True)
    if not costs.exists():
        shutil.copytree(calibrated, costs)
    return calibrated, costs


def schedule(calibrated: Path, acceptance: Sequence[float]) -> list[list[int]]:
    """vLLM's table of draft lengths by batch: the best ones for the measured costs and the drafter's acceptance."""
    (file,) = calibrated.glob("*.json")
    known = LatencyTable.from_list(json.loads(file.read_text())["points"])
    return VllmTable(known, acceptance, range(LONGEST_DRAFT + 1), REQUESTS).schedule


class Record:
    """What was measured so far, in the work folder."""

    def __init__(self, work: Path) -> None:
        self.file = work / "turns.json"
        self.turns: list[dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else []

    def done(self, arm: str, turn: int) -> bool:
        """Whether that turn was taken."""
        return any((row["arm"], row["turn"]) == (arm, turn) for row in self.turns)

    def add(self, row: dict[str, Any]) -> None:
        """Keep one turn."""
        self.turns.append(row)
        self.file.write_text(json.dumps(self.turns, indent=1))

    def steps(self, arm: str) -> list[Step]:
        """All of an arm."""
        return [Step(**step) for row in self.turns if row["arm"] == arm for step in row["steps"]]

    def accept_length(self, arm: str) -> float | None:
        """What vLLM logged, the mean of the turns."""
        logged = [row["accept_length"] for row in self.turns if row["arm"] == arm and row["accept_length"]]
        return round(sum(logged) / len(logged), 4) if logged else None


def result(
    record: Record, names: Sequence[str], rounds: int, steps: int, table: list[list[int]], forced: bool
) -> dict[str, Any]:
    """What is kept of the whole."""
    found = {name: summary(record.steps(name)) for name in names}
    for name in names:
        if found[name]["accept_length"] is None:
            found[name]["accept_length"] = record.accept_length(name)
    stock, here = record.steps(STOCK), machine()
    return {
        "machine": here,
        "commit": here["commit"],
        "dtype": find_dtype(),
        "lengths": "forced" if forced else "sampled",
        "runs": rounds,
        "steps_of_a_turn": steps,
        "vllm_table": table,
        "arms": found,
        "ratios": {name: ratios(stock, record.steps(name)) for name in names if name != STOCK},
        "turns": record.turns,
    }


def say(found: dict[str, Any]) -> None:
    """A line per arm."""
    for name, of in found["ratios"].items():
        arm, parts = found["arms"][name], []
        for what, ratio in of.items():
            if what == "saved" or ratio is None:
                continue
            parts.append(f"{what} {ratio['pooled']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})")
        print(f"{name}: {', '.join(parts)}, accept length {arm['accept_length']}")
        if of["saved"]:
            print(f"  tlt/saved_s claimed {of['saved']['claimed_s']} s; shorter by {of['saved']['measured_s']} s")


@interruptible()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of every arm")
    parser.add_argument("--steps", type=int, default=4, help="of a turn, of which the first is left out")
    parser.add_argument("--arms", nargs="+", help="only these, beside stock")
    parser.add_argument("--forced", action="store_true", help="response lengths and replicas are given")
    parser.add_argument("--toy", type=Path, default=ROOT / ".cache" / "toy", help="where the drafter is kept")
    parser.add_argument("--work", type=Path, default=Path("demo-out/e2e"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 2:
        parser.error("--rounds must be at least 1 and --steps at least 2: the first step of a turn does not count")
    work = options.work.resolve()
    print(say_dtype(find_dtype()))
    toy = prepare(options.toy.resolve())
    assets = build_assets(work / "assets", width=demo_width(find_dtype()), seed=SEED)
    calibrated, costs = calibrate(work, assets, toy.drafter)
    table = schedule(calibrated, toy.acceptance)
    every: dict[str, Arm] = arms(toy.drafter, table, costs)
    if unknown := set(options.arms or ()) - every.keys():
        parser.error(f"there is no arm {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    names = [name for name in every if not options.arms or name in {STOCK, *options.arms}]
    record = Record(work)
    for turn in range(options.rounds):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            if record.done(name, turn):
                continue
            taken = take(every[name], turn, options.steps, assets, work / name, options.forced)
            record.add({"arm": name, "turn": turn, **asdict(taken)})
            pace = [f"{step.rollout_s:.1f}/{step.step_s:.1f}" for step in taken.steps]
            print(f"{name}, turn {turn + 1}, {taken.seconds:.0f} s; rollout/step s: {', '.join(pace)}", flush=True)
    found = result(record, names, options.rounds, options.steps, table, options.forced)
    say(found)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
