"""Which draft-length policy is fastest, and what it costs: writes control.json and race.json in benchmarks/results.

    python -m benchmarks.control [--replay] [--overhead]
    python -m benchmarks.control --fixed --policy DIR --drafter DIR --prompts FILE [--load 64:20-60:1x400 ...]

`--replay` simulates rollouts against oracles (minutes), `--overhead` counts what control adds to an engine step;
without a part named, both run. `--fixed` meets vLLM's own fixed K on a real engine with a policy, an EAGLE-3 head of
`verl-tlt warmup` and prompts in verl's form; one that was killed goes on when called again. A part that is not run
keeps its figures of the last time, as do finished studies. Wall-clock timings mean something only on an idle machine.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.control.drains import LOADS, Drain
from benchmarks.control.engine import ENVIRONMENT
from benchmarks.gpu.parts import machine
from demo.machine import find_dtype, say_dtype
from verl_tlt.errors import TLTError

ROOT = Path(__file__).parents[2]
GIVEN = {
    "policy": "directory of a policy",
    "drafter": "directory of an EAGLE-3 head for it",
    "prompts": "a file of prompts that the head was not trained on",
}
PARTS = ("replay", "overhead", "fixed")
console = Console(width=150, emoji=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of the replay")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    fixed = parser.add_argument_group("the fixed part")
    for name, what in GIVEN.items():
        fixed.add_argument(f"--{name}", type=Path, help=what)
    fixed.add_argument("--load", type=Drain.parse, nargs="+", default=LOADS, metavar="REQUESTS:SHORT:NxLONG")
    fixed.add_argument("--repetitions", type=int, default=8, help="drains of every arm and load")
    fixed.add_argument("--seconds", type=float, default=7200.0, help="no repetition of these starts after so long")
    fixed.add_argument("--work", type=Path, default=ROOT / ".cache" / "race", help="where repetitions are kept")
    options = parser.parse_args()
    given = [getattr(options, name) for name in GIVEN]
    if any(bool(one) != options.fixed for one in given):
        parser.error("--fixed, --policy, --drafter and --prompts are given together, or none of them.")
    chosen = [part for part in PARTS if getattr(options, part)] or ["replay", "overhead"]
    os.environ.update(ENVIRONMENT)
    control = options.out / "control.json"
    if "replay" in chosen:
        from benchmarks.control.replay import run_all

        _add(control, run_all(console.print, options.jobs) | {"replay_on": machine()})
    if "overhead" in chosen:
        from benchmarks.control.overhead import measure

        found = measure()
        counted = {key: value for key, value in found.items() if "_us_" in key}
        console.print(counted)
        _add(control, counted | {"overhead_on": machine(), "overhead_detail": found})
    if "fixed" in chosen:
        _fixed(options, given)


def _fixed(options: argparse.Namespace, given: list[Path]) -> None:
    from benchmarks.control.fixed import against_fixed, given_models

    console.print(say_dtype(find_dtype()))
    try:
        models, prompts = given_models(*given)
        found = against_fixed(
            models, prompts, options.load, options.repetitions, options.seconds, options.work, console.print
        )
    except TLTError as error:
        raise SystemExit(str(error)) from error
    _add(options.out / "race.json", found)
    for load in found["loads"].values():
        console.print(load["verdict"])


def _add(file: Path, found: dict[str, Any]) -> None:
    """Put these figures in the place of the file's own of that name."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept | found, indent=1) + "\n")
    console.print(f"written to {file}")


if __name__ == "__main__":
    main()
