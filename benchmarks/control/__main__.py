"""Which draft-length policy is fastest, and what it costs: writes benchmarks/results/control.json.

    python -m benchmarks.control [--replay] [--overhead]
    python -m benchmarks.control --fixed [--repetitions N]

Without a part named, all run: `--replay` simulates rollouts against oracles (minutes), `--overhead` counts what control
adds to an engine step, `--fixed` meets vLLM's own fixed K on a real engine with a warmed-up drafter (an hour at most;
the first time it makes one, a quarter of an hour more). A part that is not run keeps its figures of the last time,
as do those of finished studies. Wall-clock timings mean something only on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.parts import machine
from demo.machine import find_dtype, say_dtype

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "control.json"
TOY = ROOT / ".cache" / "toy"
PARTS = ("replay", "fixed", "overhead")
console = Console(width=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--repetitions", type=int, default=9, help="drains of every arm of the fixed part")
    parser.add_argument("--seconds", type=float, default=900.0, help="no repetition of these starts after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of the replay")
    parser.add_argument("--toy", type=Path, default=TOY, help="where policy and drafter are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    chosen = [part for part in PARTS if getattr(options, part)] or PARTS
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    if "overhead" in chosen:
        found |= _overhead() | {"overhead_on": machine()}
        console.print({key: value for key, value in found.items() if "_us_" in key})
    if "fixed" in chosen:
        from benchmarks.control.fixed import against_fixed, bench_toy

        console.print(say_dtype(find_dtype()))
        found["fixed"] = against_fixed(bench_toy(options.toy), options.repetitions, options.seconds, console.print)
        found["fixed_on"] = machine()
    if "replay" in chosen:
        from benchmarks.control.replay import run_all

        found |= run_all(console.print, options.jobs) | {"replay_on": machine()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"written to {options.out}")


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
