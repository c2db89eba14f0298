"""RL end to end: stock verl, vLLM's own speculation and TLT, in turns, on a policy that learns.

    python -m benchmarks.e2e --out FILE [--rounds 3] [--steps 4] [--arms NAME ...] [--load large]
    python -m benchmarks.e2e --forced --steps 8 --arms tlt-fresh tlt --work demo-out/forced --out FILE
    python -m benchmarks.e2e --policy real --cold-start 300 --rounds 3 --steps 5 --work demo-out/real --out FILE

`verl-tlt compare` on the demo's recipe, with more arms (`arms.py`), on prompts other than the demo's. The work folder
keeps what was measured: called again, the command goes on with it, and `--rounds 0` writes `--out` from what is there.
The trained drafter is made once, by `verl-tlt warmup` on other prompts (`head.py`).

* `--load large` has four times as many responses in a step, `--load wide` eight times.
* `--forced` gives every response the length in its prompt's row, on the same replica in every arm. So what
  `tlt/saved_estimate_s` claims can be compared with what was saved (`saved` in the result), and seen when a cold start
  has paid for itself (`lead`).
* `--policy real` has a language model in the toy's place (`benchmarks.real_policy`), fewer arms, and ratios that are
  adjusted for the lengths that each arm sampled (`lengths.py`): `benchmarks.control --fixed` comes before it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.control.fixed import real_models, recorded_costs
from benchmarks.e2e.arms import COLD_START_S, LOADS, LONGEST, Load, arms
from benchmarks.e2e.head import BENCH_PROMPTS, BENCH_SEED, Head, prepare
from benchmarks.e2e.lengths import Predict, adjusted, rollouts, sampled
from benchmarks.e2e.savings import saved
from benchmarks.real_policy.head import DRAFT_LENGTH, DRAFT_VOCAB, real_head
from benchmarks.real_policy.job import LONGEST_RESPONSE, real_assets, real_overrides
from benchmarks.stored import store
from benchmarks.toy_job import FORCED, NO_CLUSTER, RECIPE, recipe_environment, toy_overrides
from tests.toy.assets import Assets, build_assets, demo_width
from verl_cpu.dtype import find_dtype, say_dtype
from verl_tlt.checks.recipe import Recipe, quoted
from verl_tlt.commands.capture import capture
from verl_tlt.commands.compare.command import report, take_turns
from verl_tlt.commands.compare.plan import STOCK, TLT, Arm, Plan, make_plan
from verl_tlt.commands.compare.record import CompareError, Record
from verl_tlt.commands.compare.result import found_of
from verl_tlt.commands.console import make_console, say
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.errors import TLTError

ROOT = Path(__file__).parents[2]
STALL_S = 900.0
REAL_ARMS = (TLT, "vllm-3", "vllm-7", "vllm-3-lost", "tlt-fresh")
RACE = ROOT / ".cache" / "race"
"""Where `benchmarks.control --fixed` keeps the step costs by which ratios are adjusted."""


@dataclass(frozen=True)
class Subject:
    """A policy, its prompts, and the trained drafter that arms start from."""

    assets: Assets
    warm: Head
    overrides: tuple[str, ...]
    """Of the demo's recipe, whatever the arm."""
    tlt: tuple[str, ...] = ()
    """Of it where the arm has TLT."""
    longest: int = LONGEST
    """Draft length."""
    arms: tuple[str, ...] = ()
    """Those that there are beside stock; none named: all."""
    predicted: Predict | None = None
    """Seconds of a rollout, by which ratios are adjusted; None: they are not."""


def toy(folder: Path, work: Path) -> Subject:
    """The toy; `folder` keeps its head, `work` policy and prompts."""
    assets = build_assets(work / "assets", width=demo_width(find_dtype()), train_rows=BENCH_PROMPTS, seed=BENCH_SEED)
    return Subject(assets, prepare(folder), toy_overrides(assets))


def real(folder: Path) -> Subject:
    """SmolLM2-135M-Instruct; `folder` keeps all of it."""
    assets, warm = real_assets(folder), real_head(folder)
    overrides = (*toy_overrides(assets), *real_overrides(assets))
    shape = (f"tlt.drafter.vocab={DRAFT_VOCAB}",)
    models, _ = real_models(folder)
    costs, prompt = recorded_costs(RACE, models)
    predicted = rollouts(costs, warm.acceptance, prompt)
    return Subject(assets, warm, overrides, shape, DRAFT_LENGTH, REAL_ARMS, predicted)


def recipe_of(work: Path, subject: Subject, load: Load, forced: bool) -> Recipe:
    """The demo's recipe on this subject; `forced`: responses of given lengths on given replicas."""
    assets = subject.assets
    given = (FORCED, f"actor_rollout_ref.rollout.router_config_path={assets.router}") if forced else ()
    environment = recipe_environment(work / "recipe", assets, 1, TLT="1", DTYPE=find_dtype())
    words = (*subject.overrides, *subject.tlt, *load.overrides, NO_CLUSTER, *given)
    return capture((str(RECIPE), *words), environment=environment)


def result(arms: Sequence[Arm], record: Record, plan: Plan, forced: bool) -> dict[str, Any]:
    found = found_of(arms, record)
    for name, ratios in found["ratios"].items():
        ratios["saved"] = saved(record.steps(STOCK), record.steps(name))
    return {
        "dtype": find_dtype(),
        "lengths": "forced" if forced else "sampled",
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


def adjusted_ratios(subject: Subject, arms: Sequence[Arm], record: Record, work: Path) -> dict[str, Any]:
    """By arm its ratios over stock, adjusted for the lengths that each sampled; empty where none are predicted."""
    if subject.predicted is None or not record.steps(STOCK):
        return {}
    tokenizer = AutoTokenizer.from_pretrained(subject.assets.policy)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    found = {a.name: sampled(record.steps(a.name), responses_of(a, work), count, LONGEST_RESPONSE) for a in arms}
    return {"adjusted": adjusted({name: steps for name, steps in found.items() if steps}, subject.predicted)}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of every arm; 0: report what was measured")
    parser.add_argument("--steps", type=int, default=4, help="of a turn, of which the first is left out")
    parser.add_argument("--arms", nargs="+", help="only these, beside stock")
    parser.add_argument("--load", choices=LOADS, default="small", help="24, 96 or 192 responses a step")
    parser.add_argument("--forced", action="store_true", help="response lengths and replicas are given")
    parser.add_argument("--cold-start", default=COLD_START_S, help="tlt.spot.cold_start_s of tlt-fresh; null: its rule")
    parser.add_argument("--policy", choices=("toy", "real"), default="toy", help="real: SmolLM2-135M-Instruct")
    parser.add_argument("--work", type=Path, default=Path("demo-out/e2e"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rounds < 0 or options.steps < 2:
        parser.error("--rounds must be at least 0 and --steps at least 2: the first step of a turn does not count")
    if options.forced and options.policy == "real":
        parser.error("--forced is of the toy: behind its ends a language model writes what no drafter was trained on")
    return options


@interruptible()
def main() -> None:
    options, console = read_options(), make_console()
    work = options.work.resolve()
    say(console, say_dtype(find_dtype()))
    load, kept = LOADS[options.load], ROOT / ".cache" / options.policy
    subject = real(kept) if options.policy == "real" else toy(kept, work)
    every = arms(subject.warm.drafter, options.cold_start, subject.longest)
    every = {name: arm for name, arm in every.items() if not subject.arms or name in {STOCK, *subject.arms}}
    if unknown := set(options.arms or ()) - every.keys():
        raise CompareError(f"There is no arm {', '.join(sorted(unknown))}; there are {', '.join(every)}.")
    chosen = [arm for name, arm in every.items() if not options.arms or name in {STOCK, *options.arms}]
    if subject.predicted is not None:
        chosen = [keeping_responses(arm, work) for arm in chosen]
    drafters = {"warm": subject.warm.facts}
    known = {"policy": options.policy, "load": options.load, "drafters": drafters}
    plan = make_plan(recipe_of(work, subject, load, options.forced), options.steps, work)
    record = Record(work, plan.asked(chosen))

    def keep() -> None:
        if options.out:
            ratios = adjusted_ratios(subject, chosen, record, work)
            found = {**result(chosen, record, plan, options.forced), **ratios, **known}
            store(options.out, found, {"WORK": work, "TOY": kept, "CLONE": ROOT})

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
