"""The memory and the cores that the demo may use here."""

import os
from contextlib import suppress
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
                f"The demo needs {NEEDED_GB:.0f} GB of free memory ({COMFORTABLE_GB:.0f} GB are better), and "
                f"{self.memory_gb:.1f} GB are free. Close other programs, or use a larger machine."
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
    cores = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):  # no such file, or no limit, which is called "max"
        memory = min(memory, float((cgroup / "memory.max").read_text()))
    with suppress(OSError, ValueError):
        quota, period = map(float, (cgroup / "cpu.max").read_text().split())
        cores = min(cores, quota / period)
    return Machine(memory / 1e9, cores)
