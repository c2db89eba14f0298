"""What a run leaves on the machine besides its own folder, and its removal once the run's processes are gone.

A run gets a temporary folder of its own (Ray's session, vLLM's sockets, everybody's `tempfile`), removed as a whole.
Two kinds of names escape it: shared memory (`/dev/shm`: weights on their way to an engine, vLLM's queues, semaphores)
and sockets whose place verl fixes. A process that is killed cannot remove its own, and their names do not say whose
they are, so /proc is asked, while the processes live, what they have open. What somebody else has open, or what is
older than the run, stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

EVERY_S, ENDING_EVERY_S = 3.0, 0.1
"""Seconds between two looks while the run goes on, and while it ends: a look takes a few hundredths of a second."""
LONGEST_BASE = 32
"""Characters of a temporary folder in which Ray's sockets still have names that Linux takes (107)."""
SHM = "/dev/shm"
SOCKET_FIELDS = 8
"""Of a line of /proc/net/unix that ends in a path."""


class Leftovers:
    """A run's temporary folder, and the files outside it that its processes own.

    Attributes:
        folder: the run's `TMPDIR`; it goes with `remove`.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="verl-tlt-", dir=base if len(base) <= LONGEST_BASE else "/tmp"))
        self._since = time.time() - 1.0  # file systems round their times
        self._noted_at = 0.0
        self._owned: set[str] = set()

    def note(self, pids: Iterable[int], every_s: float = EVERY_S) -> None:
        """Remember what these processes have open, unless that was done just now; call it as often as you like.

        Args:
            pids: the run's living processes.
            every_s: what counts as just now, seconds; 0: look.
        """
        if time.monotonic() - self._noted_at >= every_s:
            self._owned |= _open_files(pids)
            self._noted_at = time.monotonic()

    def found(self) -> list[Path]:
        """What there is now: entries of the folder, and what was noted outside it."""
        return [*self.folder.iterdir(), *(p for p in self._left_outside() if self.folder not in p.parents)]

    def remove(self) -> None:
        """Remove the folder and what was noted; call it when the processes have ended."""
        outside = self._left_outside()
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in outside:
            path.unlink(missing_ok=True)

    def _left_outside(self) -> list[Path]:
        new = {path for path in self._owned if _changed(path) >= self._since}
        others = _open_files(int(name) for name in os.listdir("/proc") if name.isdigit()) if new else set()
        return [Path(path) for path in sorted(new - others)]


def _open_files(pids: Iterable[int]) -> set[str]:
    """Paths of the shared memory that these processes have open or mapped, and of the sockets that they have bound."""
    names = {file.inode(): file.path for file in os.scandir(SHM)} if os.path.isdir(SHM) else {}
    sockets, found = _sockets(), set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            # A semaphore is mapped under a name that it has only for a moment, so the inode counts.
            mapped = re.findall(rf" (\d+) +{SHM}/", Path(f"/proc/{pid}/maps").read_text(errors="replace"))
            found.update(names[inode] for inode in map(int, mapped) if inode in names)
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it has just been closed
                    target = os.readlink(descriptor.path)
                    if target.startswith(f"{SHM}/"):
                        found.add(target.removesuffix(" (deleted)"))
                    elif target in sockets:
                        found.add(sockets[target])
    return found


def _sockets() -> dict[str, str]:
    """Unix sockets in temporary folders, as descriptors name them -> path."""
    with contextlib.suppress(OSError):  # no Linux
        rows = [line.split() for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()]
        below = tuple(f"{folder}/" for folder in {tempfile.gettempdir(), "/tmp"})
        return {f"socket:[{r[6]}]": r[7] for r in rows if len(r) == SOCKET_FIELDS and r[7].startswith(below)}
    return {}


def _changed(path: str) -> float:
    """When the file was last made or changed, unix seconds; -1 if it is gone."""
    try:
        return os.stat(path).st_ctime
    except FileNotFoundError:
        return -1.0
