"""What a job's processes hold, looked at from outside: memory, threads, open files, shared memory, Ray's objects."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

SHM = Path("/dev/shm")
MIB = 2**20


def slope(values: Sequence[float]) -> float:
    """Theil-Sen: the median of the slopes between all pairs of values, per place; 0 for fewer than two.

    One jump away from the middle, or a tenth of wild values, hardly moves it; a leak of every step is all it sees.
    """
    y = np.asarray(values, dtype=np.float64)  # [n]
    first, second = np.triu_indices(len(y), k=1)
    return float(np.median((y[second] - y[first]) / (second - first))) if len(y) > 1 else 0.0


def role(process: psutil.Process) -> str:
    """What a process is, in a word or two: Ray's name of an actor, or the program."""
    command = process.cmdline() or [process.name()]
    if command[0].startswith("ray::"):
        return re.split(r"[.(\s]", command[0].removeprefix("ray::"))[0]
    if "python" in Path(command[0]).name:
        modules = [word for word in command[1:] if not word.startswith("-")]
        return Path(modules[0]).name if modules else "python"
    return Path(command[0]).name


def sizes(pid: int) -> dict[str, float]:
    """MiB that a process holds without shared memory (`memory`), its threads and open files.

    Raises:
        OSError: it has ended.
    """
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return {
        "memory": (int(status["RssAnon"]) + int(status["RssFile"])) / 1024,
        "threads": int(status["Threads"]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }


class SharedMemory:
    """The entries of /dev/shm that came with a job: those that nobody else had open when they were first seen."""

    def __init__(self) -> None:
        self._others, self._ours = {entry.name for entry in SHM.iterdir()}, set[str]()

    def count(self, pids: Iterable[int]) -> int:
        """How many there are; `pids`: the job's processes."""
        names = {entry.name for entry in SHM.iterdir()}
        if new := names - self._others - self._ours:
            mine = set(pids)
            elsewhere = _mapped(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in mine)
            self._others |= new & elsewhere
            self._ours |= new - elsewhere
        return len(names & self._ours)


def _mapped(pids: Iterable[int]) -> set[str]:
    """Names below /dev/shm that these processes have mapped or open."""
    found = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            found |= set(re.findall(rf" {SHM}/(\S+)", Path(f"/proc/{pid}/maps").read_text(errors="replace")))
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    path = Path(os.readlink(descriptor.path))
                    found |= {path.name} if path.parent == SHM else set()
    return found


class ObjectStore:
    """Ray's, asked of the raylet of a job: no driver is started for it."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        from ray._private.internal_api import get_state_from_address

        found: list[str] = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found += re.findall(r"--gcs-address=(\S+)", " ".join(process.cmdline()))
        self._state: Any = get_state_from_address(found[0])

    def used(self) -> float:
        """MiB of objects."""
        from ray._private.internal_api import get_memory_info_reply

        return float(get_memory_info_reply(self._state).store_stats.object_store_bytes_used) / MIB
