"""`python -m demo`: the toy's assets, one run (or three to compare), the summary, the pictures, what to do next."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from demo.comparison import ratio, rows_of_metrics_file, summary
from demo.machine import DemoError, Dtype, check_packages, find_dtype, find_machine, say_dtype
from demo.run import DemoRun, run_recipe
from demo.screen import Screen
from verl_tlt.compare.processes import interruptible
from verl_tlt.console import make_console
from verl_tlt.report.figures import save_picture
from verl_tlt.report.page import serve_command, write_page
from verl_tlt.report.reader import RunTrace, TraceError, read_trace
from verl_tlt.report.rows import Row, initial_lengths, rich_table, rows_of_trace

INTERRUPTED = 130
RECIPE = Path(__file__).with_name("demo_grpo.sh")


def demo(compare: bool, steps: int, out: Path, seed: int) -> int:
    """Run the demo; returns the exit status. Errors a user can act on are printed, not raised."""
    console = make_console()
    try:
        with interruptible():
            _demo(console, compare, steps, out.resolve(), seed)
    except KeyboardInterrupt:
        console.print("Interrupted; every process of the run has been ended.")
        return INTERRUPTED
    except (DemoError, TraceError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def _demo(console: Console, compare: bool, steps: int, out: Path, seed: int) -> None:
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
        main = DemoRun("GRPO with verl-tlt", out / "tlt", steps, seed, env=env)
        run_recipe(main, RECIPE, screen)
        stock = replace(main, title="stock verl, same seed", out=out / "stock", tlt=False)
        warm = replace(main, title="GRPO with the drafter just trained", out=out / "warm", drafter=main.out / "drafter")
        if compare:
            if not warm.drafter or not warm.drafter.is_dir():
                raise DemoError(f"The run left no drafter at {warm.drafter}, so there is nothing to start warm from.")
            run_recipe(stock, RECIPE, screen)
            run_recipe(warm, RECIPE, screen)
    conclude(console, out, time.time() - started, main, (stock, warm) if compare else None)


def conclude(
    console: Console, out: Path, seconds: float, main: DemoRun, others: tuple[DemoRun, DemoRun] | None
) -> None:
    """Summary, picture and report of finished runs into `out`, and the tables on the console.

    Args:
        console: where tables and paths are printed.
        out: folder of `summary.json`, `picture.png`, `report.html`.
        seconds: what the whole demo took.
        main: the run from a random head.
        others: stock verl, and the run that started with the drafter of `main`.
    """
    trace = read_trace(main.trace)
    rows = rows_of_trace(trace)
    stock = rows_of_metrics_file(others[0].metrics) if others else None
    warm = rows_of_trace(read_trace(others[1].trace)) if others else None
    (out / "summary.json").write_text(json.dumps(summary(seconds, rows, stock, warm), indent=1))
    save_picture(out / "picture.png", trace)
    write_page(out / "report.html", trace)
    _show(console, out, trace, stock, warm)


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


def _show(
    console: Console, out: Path, trace: RunTrace, stock: Mapping[int, Row] | None, warm: Mapping[int, Row] | None
) -> None:
    rows, initial = rows_of_trace(trace), initial_lengths(trace)
    console.print(rich_table(rows, "With verl-tlt"))
    if stock is not None and warm is not None:
        console.print(rich_table(stock, "Stock verl, same seed"))
        console.print(rich_table(warm, "With the drafter just trained"))
        for name, run, column in (
            ("rollout", rows, "rollout_s"),
            ("whole step", rows, "step_s"),
            ("rollout, started with the trained drafter", warm, "rollout_s"),
        ):
            found = ratio(stock, run, column)
            console.print(f"{name} against stock, per token: {found if found else 'too few steps to compare'}")
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
