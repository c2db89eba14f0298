"""How well the draft length is chosen: files of benchmarks/results.

    python -m benchmarks.control --replay
    python -m benchmarks.control --fixed [--load 192+4@1000 4x400 ...]

`--replay`, the default, simulates rollouts against oracles, which takes half an hour of two cores. `--fixed` races a
chosen K, vLLM's fixed K and no drafts on one real engine with the real policy and its head (`benchmarks.real_policy`):
ten rounds of a wide load take about 80 minutes, and four times as long without AVX512. A command that was killed goes
on when called again, and one on another machine goes on with the rounds in `--out`. Wall-clock timings mean something
only on a core that nothing else uses.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.control.drains import LOADS, Drain
from benchmarks.control.engine import ENVIRONMENT
from benchmarks.real_policy.job import PLACE
from benchmarks.stored import store
from verl_cpu.dtype import find_dtype, say_dtype
from verl_tlt.errors import TLTError

ROOT = Path(__file__).parents[2]
console = Console(width=150, emoji=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--replay", action="store_true", help="simulate rollouts (the default)")
    part.add_argument("--fixed", action="store_true", help="race on a real engine")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of the replay")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    fixed = parser.add_argument_group("the fixed part")
    fixed.add_argument("--real", type=Path, default=PLACE, help="folder of the real policy and its head")
    fixed.add_argument("--load", type=Drain.parse, nargs="+", default=LOADS, metavar="SHORT+LONG@MOST")
    fixed.add_argument("--rounds", type=int, default=10, help="drains of every arm and load, those in --out included")
    fixed.add_argument("--work", type=Path, default=ROOT / ".cache" / "race", help="folder that keeps the rounds")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    file = options.out / ("race.json" if options.fixed else "live_table.json")
    store(file, _fixed(options, file) if options.fixed else _replayed(options))
    console.print(f"written to {file}")


def _replayed(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.control.replay import run_all

    return {"command": "python -m benchmarks.control --replay", **run_all(console.print, options.jobs)}


def _fixed(options: argparse.Namespace, file: Path) -> dict[str, Any]:
    from benchmarks.control.fixed import against_fixed, published, real_models

    earlier = json.loads(file.read_text())["races"] if file.exists() else []

    console.print(say_dtype(find_dtype()))
    try:
        models, ask = real_models(options.real.resolve())
        races = against_fixed(models, ask, options.load, options.rounds, options.work, earlier, console.print)
    except TLTError as error:
        raise SystemExit(str(error)) from error
    found = published(races)
    for load in found["loads"].values():
        console.print(load["verdict"])
    return found


if __name__ == "__main__":
    main()
