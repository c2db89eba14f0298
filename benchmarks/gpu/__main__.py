"""A first quarter of an hour on one GPU: the parts that answer the most, in the order of their worth.

    python -m benchmarks.gpu --minutes 12 --out DIR     # needs verl, vLLM and a GPU of 80 GB; downloads nothing
    python -m benchmarks.gpu --minutes 10 --out DIR --tiny     # toy sizes on the CPU

It runs `numerics` and `stop` side by side, then `small` beside `sync`, then `race` for the time that is left, each in a
process of its own. DIR has a JSON file for each part, written after every finding. No part begins that cannot end in
time, and the command ends by itself; a table comes last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.parts import device_memory
from verl_tlt.commands.interrupts import interruptible

STAGES = (
    {"numerics": "benchmarks.gpu.drafter", "stop": "benchmarks.gpu.drafter"},
    {"small": "benchmarks.gpu.engine", "sync": "benchmarks.gpu.job"},
    {"race": "benchmarks.gpu.engine"},
)
"""Parts by the module that has them; those of a stage run side by side on one device."""
END_S = 40.0
"""Seconds in which a part that was told to end is gone: its processes, and what its module imports at the start."""
LOG_BYTES = 3 << 20
"""Of each log, the end is kept."""


def run(
    stages: Sequence[Mapping[str, str]], out: Path, scratch: Path, until: float, tiny: bool
) -> dict[str, dict[str, Any]]:
    """Run all parts that can end before `until` (`time.monotonic`); what became of each. `out` has their reports."""
    for stage in stages:
        started: list[subprocess.Popen[bytes]] = []
        try:
            started += (_start(name, module, out, scratch, until, tiny) for name, module in stage.items())
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        finally:
            for process in started:
                _end(process)
    return {name: _report(out / f"{name}.json", name) for stage in stages for name in stage}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part that still runs, with all that it started: a later call on this machine needs the device."""
    if process.poll() is not None:
        return
    with suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True)
        for one in (*below, process):
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(below, timeout=5.0)
    process.wait()


def keep_logs(scratch: Path, out: Path) -> None:
    """The ends of what the parts' processes printed, which explain a failure; no empty files."""
    for log in (log for log in scratch.rglob("*.log") if log.stat().st_size):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            (out / "-".join(log.relative_to(scratch).parts)).write_bytes(file.read())


def _start(name: str, module: str, out: Path, scratch: Path, until: float, tiny: bool) -> subprocess.Popen[bytes]:
    """The command of the part's module, for this part alone, with the time that is left as its budget."""
    budget = until - END_S - time.monotonic()
    (out / f"{name}.json").unlink(missing_ok=True)  # of an earlier call
    places = ["--out", str(out / f"{name}.json"), "--scratch", str(scratch)]
    command = [sys.executable, "-m", module, "--parts", name, "--budget", f"{budget:.0f}", *places]
    return subprocess.Popen([*command, *(["--tiny"] if tiny else [])], start_new_session=True)


def _report(file: Path, name: str) -> dict[str, Any]:
    part = json.loads(file.read_text())["parts"].get(name) if file.exists() else None
    return part or {"error": "it ended without a report"}


def table_of(reports: Mapping[str, Mapping[str, Any]]) -> Table:
    """What became of each part, in a line."""
    table = Table("part", "seconds", "found")
    for name, report in reports.items():
        said = [f"{what}: {report[what]}" for what in ("skipped", "error") if what in report]
        found = report.get("found", {})
        said += [f"{what}: {value}" for what, value in found.items() if not isinstance(value, dict | list)]
        said += [f"{profile}: {sentence}" for profile, sentence in found.get("verdict", {}).items()]
        table.add_row(name, f"{report.get('seconds', 0.0):.0f}", "\n".join(said) or ", ".join(found))
    return table


@interruptible()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12.0, help="all parts end before they are over")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the reports")
    names = [name for stage in STAGES for name in stage]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help="only these")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    if not options.tiny and not device_memory():
        parser.error("there is no CUDA device here; --tiny runs every part at toy size on the CPU.")
    options.out.mkdir(parents=True, exist_ok=True)
    stages = [{name: module for name, module in stage.items() if name in options.parts} for stage in STAGES]
    scratch = Path(tempfile.mkdtemp(prefix="verl-tlt-gpu-"))
    try:
        reports = run(stages, options.out, scratch, until, options.tiny)
    finally:
        keep_logs(scratch, options.out)
        shutil.rmtree(scratch, ignore_errors=True)
    Console(width=150).print(table_of(reports))


if __name__ == "__main__":
    main()
