"""`python -m demo`: policy and drafter, a run, summary, report, what to do next; and the run against stock verl."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from demo.machine import DemoError, check_packages, find_machine
from demo.run import STALL_S, DemoRun, run_recipe
from demo.screen import Screen
from demo.warmup import warm_up
from tests.toy.assets import Assets, build_assets, demo_width
from verl_cpu.dtype import Dtype, find_dtype, say_dtype
from verl_tlt.commands.capture import capture
from verl_tlt.commands.compare.command import compare
from verl_tlt.commands.console import make_console
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.commands.options import CompareOptions
from verl_tlt.commands.page import write_page
from verl_tlt.commands.report.page import how_to_serve, run_page
from verl_tlt.commands.report.reader import RunTrace, read_trace
from verl_tlt.commands.report.steps import Row, initial_lengths, rich_table, rows_of_trace
from verl_tlt.errors import TLTError

INTERRUPTED = 130
PROOF = "The proof is `make demo-compare`."
RECIPE = Path(__file__).with_name("demo_grpo.sh")
STEPS, STEPS_FROM_SCRATCH = 6, 10
"""Of the run, where nobody says how many."""
ROUNDS, TURN = 2, 5
"""Of the comparison: turns of each arm, and steps of a turn."""


def demo(against_stock: bool, steps: int | None, out: Path, seed: int, from_scratch: bool = False) -> int:
    """Run the demo; returns the exit status. Errors a user can act on are printed, not raised."""
    steps = steps if steps is not None else STEPS_FROM_SCRATCH if from_scratch else STEPS
    console = make_console()
    try:
        with interruptible():
            _demo(console, against_stock, steps, out.resolve(), seed, from_scratch)
    except KeyboardInterrupt:
        console.print("Interrupted; every process of the run has been ended.")
        return INTERRUPTED
    except (DemoError, TLTError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def _demo(console: Console, against_stock: bool, steps: int, out: Path, seed: int, from_scratch: bool) -> None:
    started = time.time()
    if steps < 1:
        raise DemoError(f"--steps must be at least 1, not {steps}.")
    check_packages()
    for warning in find_machine().check():
        console.print(f"Note: {warning}")
    dtype = find_dtype()
    console.print(say_dtype(dtype), highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    with Screen(console) as screen:
        assets = _assets(out / "assets", dtype, screen)
        drafter = None if from_scratch else warm_up(assets, screen)
        run = DemoRun("GRPO with verl-tlt", out / "tlt", steps, seed, drafter=drafter, env=_environment(assets, dtype))
        run_recipe(run, RECIPE, screen)
    conclude(console, out, time.time() - started, run)
    if against_stock:
        compare_with_stock(console, out, run)


def compare_with_stock(console: Console, out: Path, run: DemoRun) -> None:
    """`verl-tlt compare` on the demo's recipe, with the drafter that `run` has trained."""
    own_cluster = "+ray_kwargs.ray_init.address=local"  # never join one that happens to be there
    recipe = capture((str(RECIPE), own_cluster), environment=run.environment())
    options = CompareOptions(
        rounds=ROUNDS, steps=TURN, out=out / "compare", drafter=str(run.out / "drafter"),
        stall_minutes=STALL_S / 60,
    )  # fmt: skip
    compare(recipe, options, console)


def conclude(console: Console, out: Path, seconds: float, run: DemoRun) -> None:
    """Summary and report of the finished run into `out`, and its table on the console.

    Args:
        console: where table and paths are printed.
        out: folder of `summary.json`, `report.html`.
        seconds: what the run took, with the making of the toy.
        run: the run.
    """
    trace = read_trace(run.trace)
    steps = [{"step": step, **row} for step, row in rows_of_trace(trace).items()]
    (out / "summary.json").write_text(json.dumps({"seconds": seconds, "steps": steps}, indent=1))
    write_page(out / "report.html", run_page(trace))
    _show(console, out, trace)


def _assets(folder: Path, dtype: Dtype, screen: Screen) -> Assets:
    """Build the toy, or find it from last time."""
    screen.status("making the toy policy and its prompts")
    try:
        return build_assets(folder, width=demo_width(dtype))
    except (OSError, ValueError) as error:
        raise DemoError(f"The toy could not be made: {error}") from error


def _environment(assets: Assets, dtype: Dtype) -> dict[str, str]:
    """Where the recipe finds the parts of the toy, and in which dtype it computes."""
    return {
        "DTYPE": dtype,
        "ASSETS": str(assets.policy.parent),
        "POLICY": str(assets.policy),
        "TRAIN": str(assets.train),
        "VAL": str(assets.val),
    }


def _show(console: Console, out: Path, trace: RunTrace) -> None:
    rows, initial = rows_of_trace(trace), initial_lengths(trace)
    console.print(rich_table(rows, "With verl-tlt"))
    lengths = [length for row in rows.values() if (length := row["accept_length"]) is not None]
    if lengths:
        first = f"; the run's first drafter: {list(initial.values())[-1]:.2f}" if initial else ""
        console.print(f"Accept length {lengths[0]:.2f} -> {lengths[-1]:.2f}{first}.")
    for text in (
        f"Summary: {out / 'summary.json'}",
        f"Report:  {out / 'report.html'}",
    ):
        console.print(text, highlight=False, soft_wrap=True)
    console.print(gain(rows), style="bold", highlight=False, soft_wrap=True)
    if command := how_to_serve(trace):
        console.print("Serve the drafter with", highlight=False)
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def gain(rows: Mapping[int, Row]) -> str:
    """The speed of those rollouts whose savings are known, beside that without drafts, in a sentence."""
    known = {step: row for step, row in rows.items() if row["saved_s"] is not None}
    spent = sum(row["rollout_s"] or 0.0 for row in known.values())
    if not spent:
        return f"TLT's own account does not know what drafts saved here. {PROOF}"
    tokens = sum(row["tokens"] or 0.0 for row in known.values())
    undrafted = spent + sum(row["saved_s"] or 0.0 for row in known.values())
    return (
        f"{tokens / spent:.0f} tokens/s in the rollouts of steps {', '.join(map(str, known))}, about "
        f"{undrafted / spent:.1f} times what the same steps take without drafts by TLT's own account. {PROOF}"
    )
