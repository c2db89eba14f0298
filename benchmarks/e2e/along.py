"""Does training along keep a drafter up with its policy? GRPO on the real policy, with the drafter trained or frozen.

    python -m benchmarks.e2e.along --out benchmarks/results/along.json [--steps 25] [--seeds 0 1]

Both arms start from the head after half of its warm-up (`benchmarks.real_policy.head`), with the same prompts in the
same order for a seed. The result has accept length and reward by step, and over windows of steps their means with 95 %
intervals, of each arm and of the difference. The work folder keeps finished runs: a command that was killed goes on.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.e2e.__main__ import ROOT, STALL_S, real, recipe_of
from benchmarks.e2e.arms import LOADS
from benchmarks.real_policy.head import HALF
from benchmarks.real_policy.job import PLACE
from benchmarks.stored import store
from verl_cpu.dtype import find_dtype, say_dtype
from verl_tlt.bootstrap import Floats
from verl_tlt.checks.recipe import quoted
from verl_tlt.commands.compare.command import take_turns
from verl_tlt.commands.compare.plan import NO_SPOT, TLT, Arm, make_plan
from verl_tlt.commands.compare.record import Record, Step
from verl_tlt.commands.compare.result import pooled
from verl_tlt.commands.console import make_console, say
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.errors import TLTError

WINDOW = 4
"""Steps of a window, of all seeds together."""
SHOWN = ("accept_length", "reward")
Runs = Mapping[str, Sequence[Sequence[Step]]]
"""By arm the steps of each seed."""


def arms(head: Path, longest: int) -> list[Arm]:
    common = (
        f"tlt.speculation.max_draft_length={longest}",
        f"tlt.drafter.path={quoted(head)}",
    )
    return [
        Arm(TLT, "trained in idle time", True, common),
        Arm(NO_SPOT, "frozen", True, (*common, "tlt.spot.enable=false")),
    ]


def by_window(runs: Runs) -> list[dict[str, Any]]:
    """For each window of steps and each of `SHOWN`: [mean, low, high] of each arm, and of trained less frozen."""
    last = min(step.step for of in runs.values() for steps in of for step in steps[-1:])
    first = min(step.step for of in runs.values() for steps in of for step in steps)
    found = []
    for start in range(first, last - WINDOW + 2, WINDOW):
        window: dict[str, Any] = {"steps": [start, start + WINDOW - 1]}
        for name in SHOWN:
            rows = {
                arm: [_value(steps, at, name) for at in range(start, start + WINDOW) for steps in of]
                for arm, of in runs.items()
            }
            window[name] = {arm: _mean([(value, 1.0) for value in values]) for arm, values in rows.items()}
            both = zip(rows[TLT], rows[NO_SPOT], strict=True)
            window[name]["difference"] = _mean([(trained - frozen, 1.0) for trained, frozen in both])
        found.append(window)
    return found


def _value(steps: Sequence[Step], number: int, name: str) -> float:
    (step,) = (step for step in steps if step.step == number)
    return float(getattr(step, name) or 0.0)


def _mean(rows: Sequence[tuple[float, float]]) -> list[float]:
    def figure(sums: Floats) -> Floats:
        ratio: Floats = sums[:, 0] / sums[:, 1]
        return ratio

    return [round(value, 4) for value in pooled(rows, figure)]


@interruptible()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="of a run, of which the first does not count")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the order of prompts")
    parser.add_argument("--work", type=Path, default=Path("demo-out/along"), help="folder that keeps the runs")
    parser.add_argument("--out", type=Path)
    options, console = parser.parse_args(), make_console()
    work, load = options.work.resolve(), LOADS["small"]
    say(console, say_dtype(find_dtype()))
    subject = real(PLACE)
    both = arms(PLACE / HALF, subject.longest)
    runs: dict[str, list[list[Step]]] = {arm.name: [] for arm in both}
    for seed in options.seeds:
        folder = work / f"seed-{seed}"
        order = (*subject.overrides, "data.shuffle=True", f"data.seed={seed}")
        recipe = recipe_of(folder, replace(subject, overrides=order), load, forced=False)
        plan = make_plan(recipe, options.steps, folder)
        record = Record(folder, plan.asked(both))
        take_turns(plan, both, 1, record, console, STALL_S, lambda: None)
        for arm in both:
            runs[arm.name].append(record.steps(arm.name))
    windows = by_window(runs)
    for window in windows:
        say(console, json.dumps(window))
    if options.out:
        steps = {arm: [[{n: getattr(s, n) for n in ("step", *SHOWN)} for s in of] for of in runs[arm]] for arm in runs}
        found = {"dtype": find_dtype(), "seeds": options.seeds, "windows": windows, "runs": steps}
        store(options.out, found, {"CLONE": ROOT})


if __name__ == "__main__":
    try:
        main()
    except TLTError as error:
        raise SystemExit(str(error)) from None
