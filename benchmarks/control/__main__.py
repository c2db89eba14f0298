"""Which draft-length policy is fastest, and what it costs: writes control.json and race.json in benchmarks/results.

    python -m benchmarks.control [--replay] [--overhead]
    python -m benchmarks.control --fixed [--policy DIR --drafter DIR --prompts FILE] [--load 64:20-60:1x400] ...

Without a part named, all run: `--replay` simulates rollouts against oracles (minutes), `--overhead` counts what control
adds to an engine step, `--fixed` meets vLLM's own fixed K on a real engine: with a policy, an EAGLE-3 head of
`verl-tlt warmup` and prompts in verl's form, or with the toy's (the first time it makes a head, a quarter of an hour).
A fixed part that was killed goes on when called again. A part that is not run keeps its figures of the last time, as do
those of finished studies. Wall-clock timings mean something only on an idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.control.drains import LOADS, Drain
from benchmarks.gpu.parts import machine
from demo.machine import find_dtype, say_dtype
from verl_tlt.errors import TLTError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TOY, WORK = ROOT / ".cache" / "toy", ROOT / ".cache" / "race"
GIVEN = {
    "policy": "directory of a policy",
    "drafter": "directory of an EAGLE-3 head for it",
    "prompts": "a file of prompts that the head was not trained on",
}
PARTS = ("replay", "fixed", "overhead")
console = Console(width=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of the replay")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the files of results")
    fixed = parser.add_argument_group("the fixed part")
    for name, what in GIVEN.items():
        fixed.add_argument(f"--{name}", type=Path, help=what)
    fixed.add_argument("--load", type=Drain.parse, nargs="+", default=LOADS, metavar="REQUESTS:SHORT:NxLONG")
    fixed.add_argument("--repetitions", type=int, default=8, help="drains of every arm and load")
    fixed.add_argument("--seconds", type=float, default=7200.0, help="no repetition of these starts after so long")
    fixed.add_argument("--toy", type=Path, default=TOY, help="where the toy's policy and drafter are kept")
    fixed.add_argument("--work", type=Path, default=WORK, help="where repetitions are kept")
    options = parser.parse_args()
    given = [getattr(options, name) for name in GIVEN]
    if any(given) and not all(given):
        parser.error("--policy, --drafter and --prompts are given together, or none of them.")
    chosen = [part for part in PARTS if getattr(options, part)] or PARTS
    if "fixed" in chosen:
        _fixed(options, given)
    if chosen != ["fixed"]:
        _control(options, chosen)


def _fixed(options: argparse.Namespace, given: list[Path]) -> None:
    from benchmarks.control.fixed import against_fixed, given_models, toy_models

    console.print(say_dtype(find_dtype()))
    try:
        asked = given_models(*given) if all(given) else toy_models(options.toy)
        found = against_fixed(*asked, options.load, options.repetitions, options.seconds, options.work, console.print)
    except TLTError as error:
        raise SystemExit(str(error)) from error
    _write(options.out / ("race.json" if all(given) else "race_toy.json"), found)
    for load in found["loads"].values():
        console.print(load["verdict"])


def _control(options: argparse.Namespace, chosen: Sequence[str]) -> None:
    file = options.out / "control.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    if "overhead" in chosen:
        found |= _overhead() | {"overhead_on": machine()}
        console.print({key: value for key, value in found.items() if "_us_" in key})
    if "replay" in chosen:
        from benchmarks.control.replay import run_all

        found |= run_all(console.print, options.jobs) | {"replay_on": machine()}
    _write(file, found)


def _write(file: Path, found: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"written to {file}")


def _overhead() -> dict[str, Any]:
    """In a process of its own, whose vLLM is told before its import that it runs on a CPU."""
    from benchmarks.control.engine import ENVIRONMENT

    command = [sys.executable, "-m", "benchmarks.control.overhead"]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return {**{k: v for k, v in found.items() if "_us_" in k}, "overhead_detail": found}


if __name__ == "__main__":
    main()
