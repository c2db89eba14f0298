"""`python -m demo`: runs GRPO on a toy task, and trains a weak drafter in idle time.

`demo_grpo.sh` starts stock verl with the plugin and the toy's drafter, and `verl-tlt report` shows what came of it.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from demo.machine import DemoError, find_machine
from tests.toy.assets import SHIPPED_DRAFTER, build_assets, demo_width
from verl_cpu.dtype import find_dtype, say_dtype
from verl_tlt.commands.compare.job import failure, read_rows, watched
from verl_tlt.commands.console import make_console, say
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.commands.report.command import report
from verl_tlt.errors import TLTError
from verl_tlt.trace.metrics import step_line

RECIPE = Path(__file__).with_name("demo_grpo.sh")
BIN = Path(sys.executable).parent
STALL_S = 900.0
"""Seconds without a line of output after which a command counts as hung."""
INTERRUPTED = 130


def main(
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps.")] = 7,
    out: Annotated[Path, typer.Option(help="Folder of the run and its report.")] = Path("demo-out"),
) -> None:
    """Run GRPO with TLT on a toy task, starting with a weak drafter, and write a report."""
    console = make_console()
    try:
        with interruptible():
            demo(console, steps, out.resolve())
    except KeyboardInterrupt:
        say(console, "Interrupted; every process of the demo has been ended.")
        raise typer.Exit(INTERRUPTED) from None
    except (TLTError, OSError) as error:
        say(console, str(error), "red")
        raise typer.Exit(1) from None


def demo(console: Console, steps: int, out: Path) -> None:
    """Run the demo in the folder `out`."""
    for warning in find_machine().check():
        say(console, f"Note: {warning}")
    dtype = find_dtype()
    say(console, say_dtype(dtype))
    assets = build_assets(out / "assets", width=demo_width(dtype))
    files = {"POLICY": assets.policy, "TRAIN": assets.train, "VAL": assets.val, "DRAFTER": SHIPPED_DRAFTER}
    given = {"DTYPE": dtype, "STEPS": str(steps), **{name: str(file) for name, file in files.items()}}
    grpo(console, out / "tlt", steps, given)
    report(out / "tlt" / "trace", out)
    say(console, "`make demo-compare` measures it against stock verl.")


def grpo(console: Console, folder: Path, steps: int, given: dict[str, str], recipe: Path = RECIPE) -> None:
    """Run the recipe with these variables in a new `folder`, and print a line for each of its steps."""
    log, metrics = folder / "verl.log", folder / "metrics.jsonl"
    if folder.exists() and not log.exists():
        raise DemoError(f"{folder} was not made by the demo. Choose another folder with --out.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},  # a cluster of its own
        **given,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "OUT": str(folder),
        "TLT": "1",
        "VERL_FILE_LOGGER_PATH": str(metrics),
    }
    told: set[int] = set()

    def finished_steps() -> None:
        for step, row in read_rows(metrics).items():
            if step not in told:
                told.add(step)
                say(console, step_line(row, step, steps))

    say(console, f"verl starts, which takes a minute or two. Its output: {log}")
    run(console, f"GRPO with verl-tlt, {steps} steps", ["bash", str(recipe)], environment, log, finished_steps)
    if len(told) < steps:
        raise DemoError(failure(f"The run ended after {len(told)} of {steps} steps.", log))


def run(
    console: Console,
    what: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Run a command to its end, its output in `log`; `look` is called every second. A DemoError says why it failed."""
    began = time.monotonic()
    with console.status(what) as status:

        def show() -> None:
            look()
            status.update(f"{what}: {time.monotonic() - began:.0f} s")

        code = watched(what, command, environment, log, Path.cwd(), STALL_S, show)
    look()
    if code:
        raise DemoError(failure(f"{what} failed with exit status {code}.", log))
    say(console, f"{what}: done in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
