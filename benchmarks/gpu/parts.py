"""Parts of a benchmark that are run one by one, so that one that fails costs nothing but itself.

Each part has a process of its own, with this module as its command: an error that leaves a device unusable, memory that
is not given back and a part that hangs stay with it, and peaks of memory are its own. The report is written after each
part. It begins with the machine, since figures without it say nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from verl_cpu.environment import CPU_ENGINE
from verl_tlt.commands.child_engine import ChildEngineError, run_job, serve_job
from verl_tlt.upstream.versions import installed

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

ROOT = Path(__file__).parents[2]
NEEDS_CUDA = "needs CUDA"
"""Stands for a figure that no other device can give."""
FINDINGS = "findings.json"
TINY_SLOWER = 4.0
"""So many times as long as on a GPU a part may take at toy size, on a CPU that may have other work."""
PACKAGES = ("verl_tlt", "torch", "triton", "transformers", "speculators", "vllm", "verl", "ray")
SHOWN_FLAGS = ("avx", "amx", "sve", "bf16")
"""Beginnings of the CPU's flags that matter to matrix products."""


@dataclass(frozen=True)
class Bench:
    tiny: bool
    """Toy sizes on the CPU."""
    directory: Path
    """For what it writes; models that parts share lie in the directory above."""
    until: float = math.inf
    """When the part is ended, by `time.time`."""

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def cuda(self) -> bool:
        return not self.tiny

    def memory(self) -> list[float] | str:
        """GiB in use on each device."""
        return device_memory() if self.cuda else NEEDS_CUDA

    def left(self) -> float:
        """Seconds until the part is ended."""
        return self.until - time.time()

    def note(self, **findings: Any) -> None:
        """Keep what a part has found so far: it is in the report even if the part fails later or takes too long."""
        file = self.directory / FINDINGS
        kept = json.loads(file.read_text()) if file.exists() else {}
        (partial := file.with_suffix(".partial")).write_text(json.dumps(kept | findings))
        partial.replace(file)


@dataclass(frozen=True)
class Part:
    work: Callable[[Bench], Any]
    """What it finds out: a dict that JSON takes, or a coroutine of one."""
    least_s: float
    """It is not begun with less time left."""
    most_s: float = math.inf
    """It is ended after so long."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of its process."""


def main(module: str, parts: Mapping[str, Part], description: str) -> None:
    """Command line of the benchmark in `module`: run its parts in their order, as many as fit the budget."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the report, JSON; written after each part")
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts), metavar="PART")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="of all parts together")
    parser.add_argument("--tiny", action="store_true", help="every part at toy size on the CPU")
    parser.add_argument("--scratch", type=Path, help="keeps models and logs; else a temporary directory")
    options = parser.parse_args()
    if not options.tiny and not device_memory():
        parser.error("there is no CUDA device here; --tiny runs every part at toy size on the CPU.")
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="verl-tlt-gpu-"))
    try:
        run(module, {name: parts[name] for name in options.parts}, scratch.resolve(), options)
    finally:
        if options.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)


def run(module: str, parts: Mapping[str, Part], scratch: Path, options: argparse.Namespace) -> None:
    """Run the parts, print what each found, and keep the report after every finding."""
    begin = time.monotonic()
    found: dict[str, Any] = {}
    report = {"benchmark": module, "tiny": options.tiny, "machine": machine(), "parts": found}

    def keep() -> None:
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            (partial := options.out.with_suffix(".partial")).write_text(json.dumps(report, indent=1) + "\n")
            partial.replace(options.out)

    for name, part in parts.items():
        start, noted = time.monotonic(), scratch / name / FINDINGS

        def tell(name: str = name, start: float = start, noted: Path = noted) -> None:
            if noted.exists():
                found[name] = {"found": json.loads(noted.read_text()), "seconds": round(time.monotonic() - start, 1)}
                keep()

        found[name] = attempt(module, name, part, options.tiny, scratch, options.budget - (start - begin), tell)
        found[name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
        keep()


def of_clone(environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """`environment` for a child process that imports modules of this clone which are not installed."""
    path = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), path]))}


def attempt(
    module: str,
    name: str,
    part: Part,
    tiny: bool,
    scratch: Path,
    left_s: float,
    tell: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """What a part found, under `found`; or why there is nothing or not all, under `skipped` or `error`."""
    if left_s < part.least_s:
        return {"skipped": f"{left_s:.0f} s of the budget were left, and it takes {part.least_s:.0f} s or more"}
    environment = of_clone({**(CPU_ENGINE if tiny else {}), **part.environment})
    most_s, directory = part.most_s * (TINY_SLOWER if tiny else 1.0), scratch / name
    limit_s = min(left_s, most_s)
    job = {"module": module, "part": name, "tiny": tiny, "until": time.time() + limit_s}
    (noted := directory / FINDINGS).unlink(missing_ok=True)
    try:
        return {"found": run_job("benchmarks.gpu.parts", job, directory, environment, limit_s, tell)}
    except ChildEngineError as error:
        found = {"found": json.loads(noted.read_text())} if noted.exists() else {}
        return {**found, "error": str(error)}


# ---------------------------------------------------------------------- the machine


def machine() -> dict[str, Any]:
    """What the figures hold for: devices, driver, processor, versions, and the commit."""
    cpu: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        rows = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        cpu = {key.strip(): value.strip() for key, _, value in reversed(list(rows))}
    flags = sorted(flag for flag in cpu.get("flags", cpu.get("Features", "")).split() if flag.startswith(SHOWN_FLAGS))
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "gpu": _said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "cpu": cpu.get("model name", platform.machine()),
        "cpu_flags": flags,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in PACKAGES},
        "commit": _said("git", "rev-parse", "HEAD"),
        "changed_files": _said("git", "status", "--porcelain", "--untracked-files=no"),
    }


def device_memory() -> list[float]:
    """GiB in use on each CUDA device, without opening a context there; empty where there is none."""
    said = _said("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return [round(float(line) / 1024, 2) for line in (said or "").splitlines()]


def _said(*command: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# ---------------------------------------------------------------------- inside a part


def clock(device: str) -> float:
    """Seconds, once the device has done what it was told."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(device: str, calls: Sequence[Callable[[], Any]]) -> list[float]:
    taken = []
    for call in calls:
        start = clock(device)
        call()
        taken.append(round(clock(device) - start, 4))
    return taken


def peak_gib(device: str) -> float | str:
    """Most memory that torch had handed out on the device since the last call."""
    if device != "cuda":
        return NEEDS_CUDA
    import torch

    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)


def planned_gib(model: Eagle3DraftModel, rows: int, passes: int, scored: int = 0) -> float:
    """What a session plans with (`verl_tlt.drafter.session_bytes`): the peak must not be above it."""
    from verl_tlt.drafter import session_bytes

    return round(session_bytes(model, rows, passes, scored) / 2**30, 2)


def _work(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The process of one part."""
    part: Part = importlib.import_module(asked["module"]).PARTS[asked["part"]]
    answer = part.work(Bench(asked["tiny"], directory, asked["until"]))
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


if __name__ == "__main__":
    serve_job(_work)
