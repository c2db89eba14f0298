"""Does training along keep a drafter up with its policy? GRPO of a language model, its drafter trained or frozen.

    python -m benchmarks.e2e.along --out benchmarks/results/along.json [--steps 25] [--seeds 0 1]

Both arms start from a head of `verl-tlt warmup` that has seen little text, with the same prompts in the same order for
a seed. K is the same in every step, since a chosen one would change the accept length too, and the spot trainer has its
defaults. The policy has had less fine-tuning than that of the other benchmarks, so that it still learns. The result has
accept length and reward by step, and over windows of steps their means with 95 % intervals, of each arm and of the
difference. The work folder keeps finished runs: a command that was killed goes on.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.e2e.__main__ import ROOT, STALL_S, Subject, recipe_of
from benchmarks.e2e.arms import LOADS
from benchmarks.e2e.head import Head
from benchmarks.real_policy.head import DRAFT_VOCAB, made_so_far, train
from benchmarks.real_policy.job import real_assets, real_overrides
from benchmarks.real_policy.policy import make_policy
from benchmarks.stored import store
from benchmarks.toy_job import toy_overrides
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

PLACE = ROOT / ".cache" / "along"
"""Keeps the policy and its head."""
FINE_TUNING, K, LONGEST = 60, 5, 500
"""Steps of fine-tuning, the draft length, and the most tokens of a response."""
PROMPTS, EPOCHS = 245, 1
"""Of the warm-up."""
WINDOW = 4
"""Steps of a window, of all seeds together."""
SHOWN = ("accept_length", "reward")
Runs = Mapping[str, Sequence[Sequence[Step]]]
"""By arm the steps of each seed."""


ARMS = (
    Arm(TLT, "trained in idle time", True),
    Arm(NO_SPOT, "frozen", True, ("tlt.spot.enable=false",)),
)


def subject(order: int) -> Subject:
    """The policy and its head, made unless they are there, and prompts in an order that this seed gives."""
    make_policy(PLACE, FINE_TUNING)
    if not made_so_far(PLACE):
        train(PLACE, PROMPTS, ("--epochs", str(EPOCHS)))
    assets, head = real_assets(PLACE), PLACE / "drafter"
    besides = ("data.shuffle=True", f"data.seed={order}", f"data.max_response_length={LONGEST}")
    drafts = ("tlt.speculation.policy=fixed", f"tlt.speculation.fixed={K}", f"tlt.speculation.max_draft_length={K}")
    drafter = (f"tlt.drafter.vocab={DRAFT_VOCAB}", f"tlt.drafter.path={quoted(head)}")
    training = ("tlt.drafter.learning_rate=1e-3", "tlt.spot.max_epochs=3")  # the defaults; the demo's recipe has others
    ours = (*drafts, *drafter, *training)
    return Subject(assets, Head(head, {}), (*toy_overrides(assets), *real_overrides(assets), *besides), ours, K)


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
    work = options.work.resolve()
    say(console, say_dtype(find_dtype()))
    runs: dict[str, list[list[Step]]] = {arm.name: [] for arm in ARMS}
    for seed in options.seeds:
        folder = work / f"seed-{seed}"
        recipe = recipe_of(folder, subject(seed), LOADS["small"], forced=False)
        plan = make_plan(recipe, options.steps, folder)
        record = Record(folder, plan.asked(ARMS))
        take_turns(plan, ARMS, 1, record, console, STALL_S, lambda: None)
        for arm in ARMS:
            runs[arm.name].append(record.steps(arm.name))
    windows = by_window(runs)
    for window in windows:
        say(console, json.dumps(window))
    if options.out:
        steps = {arm: [[{n: getattr(s, n) for n in ("step", *SHOWN)} for s in of] for of in runs[arm]] for arm in runs}
        found = {"dtype": find_dtype(), "draft_length": K, "seeds": options.seeds, "windows": windows, "runs": steps}
        store(options.out, found, {"CLONE": ROOT})


if __name__ == "__main__":
    try:
        main()
    except TLTError as error:
        raise SystemExit(str(error)) from None
