"""The memory and the cores that the demo may use here."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_tlt.errors import TLTError

NEEDED_GB = 14.0
"""Available memory below which the run would be killed half-way."""
COMFORTABLE_GB = 18.0
COMFORTABLE_CORES = 2


class DemoError(TLTError):
    """The demo cannot go on; the message is what the user needs to read."""


@dataclass(frozen=True)
class Machine:
    """What this process may use."""

    memory_gb: float
    cores: float

    def check(self) -> list[str]:
        """Warnings, each a sentence.

        Raises:
            DemoError: too little memory.
        """
        if self.memory_gb < NEEDED_GB:
            raise DemoError(
                f"The demo needs about {COMFORTABLE_GB:.0f} GB of memory and {self.memory_gb:.1f} GB are available: "
                "close something, or run it on a larger machine."
            )
        warnings = []
        if self.memory_gb < COMFORTABLE_GB:
            warnings.append(f"Only {self.memory_gb:.1f} GB of memory are available; the demo uses up to 18 GB.")
        if self.cores < COMFORTABLE_CORES:
            warnings.append(f"With {self.cores:.1f} cores the two replicas share one: expect twice the time, no gain.")
        return warnings


def find_machine(cgroup: Path = Path("/sys/fs/cgroup")) -> Machine:
    """Memory and cores, the smaller of what the machine has and what a container (cgroup v2) grants."""
    memory = float(psutil.virtual_memory().available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        memory = min(memory, limit - used + _reclaimable(cgroup / "memory.stat"))
    cores = float(len(os.sched_getaffinity(0)))
    quota = _read(cgroup / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, float(quota[0]) / float(quota[1]))
    return Machine(memory / 1e9, cores)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no cgroup v2, or the root group, which has no limits: the machine's own numbers count; no Linux
        return ""


def _number(path: Path) -> float | None:
    text = _read(path).strip()
    return float(text) if text.isdigit() else None


def _reclaimable(stat: Path) -> float:
    """Bytes of page cache that count as used and are given back on demand."""
    for line in _read(stat).splitlines():
        if line.startswith("inactive_file "):
            return float(line.split()[1])
    return 0.0
