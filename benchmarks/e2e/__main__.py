"""RL end to end: stock verl, vLLM's own speculation and TLT, in turns, on a language model that learns.

    python -m benchmarks.e2e --out FILE [--rounds 3] [--steps 5] [--arms NAME ...] [--load wide] [--work FOLDER]

`verl-tlt compare` on the demo's recipe, with SmolLM2-135M-Instruct in the toy's place (`benchmarks.real_policy`) and
more arms (`arms.py`). The work folder keeps what was measured: called again, the command goes on with it, and
`--rounds 0` writes `--out` from what is there.

Ratios are also given adjusted for the lengths that each arm sampled (`lengths.py`), by the step costs that
`benchmarks.control --fixed` measured before. `saved` has what `tlt/saved_estimate_s` claimed beside what was measured.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.control.fixed import real_models, recorded_costs
from benchmarks.e2e.arms import COLD_START_S, LOADS, Load, arms
from benchmarks.e2e.head import Head
from benchmarks.e2e.lengths import Predict, Sampled, adjusted, rollouts, sampled
from benchmarks.e2e.savings import saved
from benchmarks.gpu.parts import machine
from benchmarks.real_policy.head import DRAFT_LENGTH, DRAFT_VOCAB, real_head
from benchmarks.real_policy.job import LONGEST_RESPONSE, PLACE, real_assets, real_overrides
from benchmarks.stored import store
from benchmarks.toy_job import NO_CLUSTER, RECIPE, recipe_environment, toy_overrides
from tests.toy.assets import Assets
from verl_cpu.dtype import find_dtype, say_dtype
from verl_tlt.checks.recipe import Recipe, quoted
from verl_tlt.commands.capture import capture
from verl_tlt.commands.compare.command import report, take_turns
from verl_tlt.commands.compare.plan import STOCK, Arm, Plan, make_plan
from verl_tlt.commands.compare.record import CompareError, Record
from verl_tlt.commands.compare.result import found_of
from verl_tlt.commands.console import make_console, say
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.errors import TLTError

ROOT = Path(__file__).parents[2]
STALL_S = 900.0
RACE = ROOT / ".cache" / "race"
"""Where `benchmarks.control --fixed` keeps the step costs by which ratios are adjusted."""


def recipe_of(work: Path, assets: Assets, load: Load, overrides: Sequence[str]) -> Recipe:
    """The demo's recipe with this policy, its prompts and these overrides; `tlt.*` count in arms with TLT."""
    environment = recipe_environment(work / "recipe", assets, 1, TLT="1", DTYPE=find_dtype())
    words = (*toy_overrides(assets), *real_overrides(assets), *overrides, *load.overrides, NO_CLUSTER)
    return capture((str(RECIPE), *words), environment=environment)


def predictions(head: Head) -> tuple[Predict, dict[str, Any]]:
    """Seconds of a rollout with this head, by which ratios are adjusted, and what they are computed from."""
    models, _ = real_models(PLACE)
    costs, prompt = recorded_costs(RACE, models)
    known = {"step_costs": costs.to_list(), "acceptance": list(head.acceptance), "prompt_tokens": prompt}
    return rollouts(costs, head.acceptance, prompt), known


def result(arms: Sequence[Arm], record: Record, plan: Plan) -> dict[str, Any]:
    found = found_of(arms, record)
    for name, ratios in found["ratios"].items():
        ratios["saved"] = saved(record.steps(STOCK), record.steps(name))
    return {
        "dtype": find_dtype(),
        "runs": max((len(record.of(arm.name)) for arm in arms), default=0),
        "steps_of_a_turn": plan.steps,
        **found,
    }


def keeping_responses(arm: Arm, work: Path) -> Arm:
    """The arm with verl writing the responses of each step."""
    folder = f"trainer.rollout_data_dir={quoted(responses_of(arm, work))}"
    return replace(arm, overrides=(*arm.overrides, folder))


def responses_of(arm: Arm, work: Path) -> Path:
    return work / arm.name / "responses"


def adjusted_ratios(
    policy: Path, predicted: Predict, arms: Sequence[Arm], record: Record, work: Path
) -> dict[str, Any]:
    """By arm its ratios over stock, adjusted for the lengths that each sampled, and these lengths by step, with the
    rollout that is predicted for them; empty before stock has a step.
    """
    if not record.steps(STOCK):
        return {}
    tokenizer = AutoTokenizer.from_pretrained(policy)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    found = {a.name: sampled(record.steps(a.name), responses_of(a, work), count, LONGEST_RESPONSE) for a in arms}
    return {
        "adjusted": adjusted({name: steps for name, steps in found.items() if steps}, predicted),
        "lengths": {name: [_lengths(name, one, predicted) for one in steps] for name, steps in found.items()},
    }


def _lengths(arm: str, one: Sampled, predicted: Predict) -> dict[str, Any]:
    seconds = round(predicted(arm, one.lengths), 2)
    return {"turn": one.step.turn, "step": one.step.step, "lengths": list(one.lengths), "predicted_s": seconds}


def commits_in(work: Path, *, runs: bool) -> list[str]:
    """The commits at which the turns in `work` were taken; `runs`: this one, too, from now on."""
    file = work / "commits.json"
    commits: list[str] = json.loads(file.read_text()) if file.exists() else []
    here = machine()["commit"]
    if runs and here and here not in commits:
        commits.append(here)
        file.write_text(json.dumps(commits))
    return commits


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of every arm; 0: report what was measured")
    parser.add_argument("--steps", type=int, default=5, help="of a turn, of which the first is left out")
    parser.add_argument("--arms", nargs="+", help="only these, beside stock")
    parser.add_argument("--load", choices=LOADS, default="small", help="24 or 192 responses a step")
    parser.add_argument("--cold-start", default=COLD_START_S, help="tlt.spot.cold_start_s of tlt-fresh; null: its rule")
    parser.add_argument("--work", type=Path, default=Path("demo-out/real"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rounds < 0 or options.steps < 2:
        parser.error("--rounds must be at least 0 and --steps at least 2: the first step of a turn does not count")
    return options


@interruptible()
def main() -> None:
    options, console = read_options(), make_console()
    work = options.work.resolve()
    say(console, say_dtype(find_dtype()))
    assets, head = real_assets(PLACE), real_head(PLACE)
    predicted, known = predictions(head)
    every = arms(head.drafter, options.cold_start, DRAFT_LENGTH)
    if unknown := set(options.arms or ()) - every.keys():
        raise CompareError(f"There is no arm {', '.join(sorted(unknown))}; there are {', '.join(every)}.")
    named = [arm for name, arm in every.items() if not options.arms or name in {STOCK, *options.arms}]
    chosen = [keeping_responses(arm, work) for arm in named]
    recipe = recipe_of(work, assets, LOADS[options.load], [f"tlt.drafter.vocab={DRAFT_VOCAB}"])
    plan = make_plan(recipe, options.steps, work)
    record = Record(work, plan.asked(chosen))
    commits = commits_in(work, runs=bool(record.left([arm.name for arm in chosen], options.rounds)))

    def keep() -> None:
        if options.out:
            ratios = adjusted_ratios(assets.policy, predicted, chosen, record, work)
            about = {"load": options.load, "drafters": {"warm": head.facts}, "predicted_from": known}
            found = {"commits": commits, **result(chosen, record, plan), **ratios, **about}
            store(options.out, found, {"WORK": work, "REAL": PLACE, "CLONE": ROOT})

    try:
        take_turns(plan, chosen, options.rounds, record, console, STALL_S, keep)
    finally:
        keep()
        report(plan, chosen, record, console)


if __name__ == "__main__":
    try:
        main()
    except TLTError as error:
        raise SystemExit(str(error)) from None
