"""`python -m demo`: the toy's assets, a run, summary, pictures, what to do next; and the run against stock verl."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console

from demo.machine import DemoError, Dtype, check_packages, find_dtype, find_machine, say_dtype
from demo.run import STALL_S, DemoRun, run_recipe
from demo.screen import Screen
from verl_tlt.commands.compare.command import CompareOptions, compare
from verl_tlt.commands.console import make_console
from verl_tlt.commands.processes import interruptible
from verl_tlt.commands.report.figures import save_picture
from verl_tlt.commands.report.page import serve_command, write_page
from verl_tlt.commands.report.reader import RunTrace, read_trace
from verl_tlt.commands.report.steps import initial_lengths, rich_table, rows_of_trace
from verl_tlt.commands.script.reader import read_script
from verl_tlt.errors import TLTError

INTERRUPTED = 130
RECIPE = Path(__file__).with_name("demo_grpo.sh")
ROUNDS, TURN = 2, 5
"""Of the comparison: turns of each arm, and steps of a turn."""


def demo(against_stock: bool, steps: int, out: Path, seed: int) -> int:
    """Run the demo; returns the exit status. Errors a user can act on are printed, not raised."""
    console = make_console()
    try:
        with interruptible():
            _demo(console, against_stock, steps, out.resolve(), seed)
    except KeyboardInterrupt:
        console.print("Interrupted; every process of the run has been ended.")
        return INTERRUPTED
    except (DemoError, TLTError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def _demo(console: Console, against_stock: bool, steps: int, out: Path, seed: int) -> None:
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
        env = _assets(out / "assets", dtype, screen) | {"DTYPE": dtype}
        run = DemoRun("GRPO with verl-tlt", out / "tlt", steps, seed, env=env)
        run_recipe(run, RECIPE, screen)
    conclude(console, out, time.time() - started, run)
    if against_stock:
        compare_with_stock(console, out, run)


def compare_with_stock(console: Console, out: Path, run: DemoRun) -> None:
    """`verl-tlt compare` on the demo's recipe, with the drafter that `run` has trained."""
    own_cluster = "+ray_kwargs.ray_init.address=local"  # never join one that happens to be there
    recipe = read_script(RECIPE, (own_cluster,), run.environment())
    options = CompareOptions(
        arms=["tlt"], rounds=ROUNDS, steps=TURN, out=out / "compare", drafter=str(run.out / "drafter"), stall_s=STALL_S
    )
    compare(recipe, options, console)


def conclude(console: Console, out: Path, seconds: float, run: DemoRun) -> None:
    """Summary, picture and report of the finished run into `out`, and its table on the console.

    Args:
        console: where table and paths are printed.
        out: folder of `summary.json`, `picture.png`, `report.html`.
        seconds: what the run took, with the making of the toy.
        run: the run.
    """
    trace = read_trace(run.trace)
    steps = [{"step": step, **row} for step, row in rows_of_trace(trace).items()]
    (out / "summary.json").write_text(json.dumps({"seconds": seconds, "steps": steps}, indent=1))
    save_picture(out / "picture.png", trace)
    write_page(out / "report.html", trace)
    _show(console, out, trace)


def _assets(folder: Path, dtype: Dtype, screen: Screen) -> dict[str, str]:
    """Build the toy (or find it from last time); returns where the recipe finds its parts."""
    from demo.toy.assets import build_assets, demo_width

    screen.status("making the toy policy and its prompts")
    try:
        assets = build_assets(folder, width=demo_width(dtype))
    except (OSError, ValueError) as error:
        raise DemoError(f"The toy could not be made: {error}") from error
    return {
        "ASSETS": str(folder),
        "POLICY": str(assets.policy),
        "TRAIN": str(assets.train),
        "VAL": str(assets.val),
        "AUX_LAYERS": ",".join(map(str, assets.aux_layers)),
    }


def _show(console: Console, out: Path, trace: RunTrace) -> None:
    rows, initial = rows_of_trace(trace), initial_lengths(trace)
    console.print(rich_table(rows, "With verl-tlt"))
    lengths = [length for row in rows.values() if (length := row["accept_length"]) is not None]
    if lengths:
        untrained = f"; the first drafter, never trained: {list(initial.values())[-1]:.2f}" if initial else ""
        console.print(f"Accept length {lengths[0]:.2f} -> {lengths[-1]:.2f}{untrained}.")
    for text in (
        f"Summary: {out / 'summary.json'}",
        f"Picture: {out / 'picture.png'}",
        f"Report:  {out / 'report.html'}",
    ):
        console.print(text, highlight=False, soft_wrap=True)
    if command := serve_command(trace):
        console.print("Serve the drafter with", highlight=False)
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
