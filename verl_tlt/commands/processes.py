"""Runs a command of which no process and no file is left when it is stopped, however its processes detach.

Ray starts daemons in sessions of their own and vLLM starts engine processes; when their parent dies init would adopt
them, and no process group names them any more. So this process makes itself the one that adopts orphans
(`PR_SET_CHILD_SUBREAPER`, prctl(2)): all that the command started are its children or theirs.

A command gets a temporary folder of its own (Ray's session, vLLM's sockets, everybody's `tempfile`), which is removed.
Two kinds of files lie elsewhere: shared memory (`/dev/shm`: weights on their way to an engine, vLLM's queues,
semaphores) and sockets whose place verl fixes. A killed process cannot remove its own, and their names do not say whose
they are, so /proc is read, while the processes live, for the files that they have open. Files that somebody else has
open, or that are older than the command, stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from verl_tlt.errors import TLTError

PR_SET_CHILD_SUBREAPER = 36
TERM_S = 8.0
"""Seconds for the command itself to end after SIGTERM."""
REST_S = 1.5
"""Seconds for the command's descendants to end with it, and again after a SIGTERM of their own."""
KILL_S = 10.0
"""Seconds in which SIGKILL must have worked."""
EVERY_S, ENDING_EVERY_S = 3.0, 0.1
"""Seconds between readings of /proc as the command runs, and as it ends; one takes a few hundredths of a second."""
LONGEST_BASE = 32
"""Most characters of a temporary folder in which the paths of Ray's sockets have no more than Linux takes (107)."""
SHM = "/dev/shm"
SOCKET_FIELDS = 8
"""Fields of a line of /proc/net/unix that ends in a path."""


@contextlib.contextmanager
def running(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None
) -> Iterator[ProcessTree]:
    """Run a command while the block runs; on any way out, by a signal too, its whole process tree is ended.

    A TLTError says that a process could not be ended.
    """
    tree: ProcessTree | None = None
    with interruptible():
        try:
            with deferred_interrupts():
                tree = ProcessTree(argv, env=env, log=log, cwd=cwd)
            yield tree
        finally:
            if tree is not None and (left := tree.stop()):
                raise TLTError(f"These processes could not be ended: {', '.join(map(str, left))}. Their log is {log}.")


class ProcessTree:
    """Starts `argv` in its own session, its output in `log`. One tree at a time: orphans since its start are its own.

    The command's `TMPDIR` is a folder of its own; `stop` removes it, and the shared memory of the tree's processes.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None) -> None:
        self._leftovers, self._every_s = Leftovers(), EVERY_S
        self._before = set(psutil.Process().children())
        self._known: list[psutil.Process] = []
        _adopt_orphans(True)
        own = {**env, "TMPDIR": str(self._leftovers.folder)}
        try:
            with log.open("ab") as out:
                self.process = subprocess.Popen(
                    argv, env=own, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
        except BaseException:
            self._leftovers.remove()
            _adopt_orphans(False)
            raise
        self.alive()

    def alive(self) -> list[psutil.Process]:
        """Every living process of the tree; call it now and then while the command runs."""
        descendants = set(psutil.Process().children(recursive=True))
        for other in self._before:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendants -= {other, *other.children(recursive=True)}
        self._known = [process for process in descendants if _lives(process)]
        self._leftovers.note([process.pid for process in self._known], self._every_s)
        return self._known

    def left_behind(self) -> list[Path]:
        """Files that a tree which has ended by itself did not clear away; `stop` removes them."""
        folder, outside = self._leftovers.folder, self._leftovers.outside()
        return [*folder.iterdir(), *(path for path in outside if folder not in path.parents)]

    def stop(self) -> list[int]:
        """End the whole tree: SIGTERM to the command, to all, then SIGKILL. Removes its files; Ctrl-C waits for this.

        Returns the ids of processes that survived even SIGKILL: none in every healthy case.
        """
        with deferred_interrupts():
            self._every_s = ENDING_EVERY_S
            self._end(signal.SIGTERM, TERM_S, alone=True)
            for sent, seconds in ((None, REST_S), (signal.SIGTERM, REST_S), (signal.SIGKILL, KILL_S)):
                self._end(sent, seconds)
            left = [p.pid for p in self.alive()]
            self._leftovers.remove()
            _adopt_orphans(False)
            return left

    def kill(self) -> None:
        """Kill every process at once: no later line of a script is run, and no trap of it."""
        with deferred_interrupts():
            self._end(signal.SIGKILL, KILL_S)

    def _end(self, sent: signal.Signals | None, seconds: float, alone: bool = False) -> None:
        """Signal every living process once, until none is left: a dying one may start another. `alone`: the command."""
        command, deadline, signalled = self.process.pid, time.monotonic() + seconds, set[int]()
        while time.monotonic() < deadline and (left := [p for p in self.alive() if not alone or p.pid == command]):
            if sent is not None and (new := [p for p in left if p.pid not in signalled]):
                signalled.update(p.pid for p in new)
                stopped = self._known  # while the files are noted that they own
                for process in stopped:
                    _send(process, signal.SIGSTOP)
                try:
                    self._leftovers.note([process.pid for process in stopped], every_s=0)
                    for process in new:
                        _send(process, sent)
                finally:
                    for process in stopped:
                        _send(process, signal.SIGCONT)
            time.sleep(0.05)
            self.process.poll()
            for child in set(psutil.Process().children()) - self._before:  # orphans, which this process adopted
                if child.pid != command:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(child.pid, os.WNOHANG)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, sent: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # the latter of another user's program
        process.send_signal(sent)


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP come at the end of the block, which holds what a `finally` needs, or clean-up.

    Signals arrive in the main thread; in another one there is nothing to defer.
    """
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if main else ()
    with _handled(numbers, lambda number, _: came.append(number)):
        yield
    if came:
        signal.raise_signal(came[0])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that one `finally` covers them all.

    Signals arrive in the main thread; in another one this does nothing.
    """
    main = threading.current_thread() is threading.main_thread()
    with _handled((signal.SIGTERM, signal.SIGHUP) if main else (), signal.default_int_handler):
        yield


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle these signals within the block, except those that are ignored, as `nohup` has it."""
    before = {n: signal.signal(n, handler) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Leftovers:
    """A command's temporary folder (`folder`, its `TMPDIR`), and the files outside it that its processes own."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="verl-tlt-", dir=base if len(base) <= LONGEST_BASE else "/tmp"))
        self._since = time.time() - 1.0  # file systems round their times
        self._noted_at = 0.0
        self._owned: set[str] = set()

    def note(self, pids: Iterable[int], every_s: float = EVERY_S) -> None:
        """Remember what these processes have open, unless that was done less than `every_s` seconds ago."""
        if time.monotonic() - self._noted_at >= every_s:
            self._owned |= _open_files(pids)
            self._noted_at = time.monotonic()

    def remove(self) -> None:
        """Remove the folder and the noted files; call it when the processes have ended."""
        for path in self.outside():
            with contextlib.suppress(OSError):  # another user's, whose processes cannot be looked into
                path.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def outside(self) -> list[Path]:
        """The noted files that are newer than the command and that no other process has open."""
        new = set()
        for path in self._owned:
            with contextlib.suppress(OSError):  # it is gone
                if os.stat(path).st_ctime >= self._since:
                    new.add(path)
        others = _open_files(int(name) for name in os.listdir("/proc") if name.isdigit()) if new else set()
        return [Path(path) for path in sorted(new - others)]


def _open_files(pids: Iterable[int]) -> set[str]:
    """Paths of the shared memory that these processes have open or mapped, and of the sockets that they have bound."""
    names = {file.inode(): file.path for file in os.scandir(SHM)} if os.path.isdir(SHM) else {}
    sockets, paths = _sockets(), set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            # A semaphore is mapped under a name that it has only for a moment, so the inode counts.
            mapped = re.findall(rf" (\d+) +{SHM}/", Path(f"/proc/{pid}/maps").read_text(errors="replace"))
            paths.update(names[inode] for inode in map(int, mapped) if inode in names)
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it has just been closed
                    target = os.readlink(descriptor.path)
                    if target.startswith(f"{SHM}/"):
                        paths.add(target.removesuffix(" (deleted)"))
                    elif target in sockets:
                        paths.add(sockets[target])
    return paths


def _sockets() -> dict[str, str]:
    """Paths of Unix sockets in temporary folders, by the names that file descriptors have for them."""
    with contextlib.suppress(OSError):  # no Linux
        rows = [line.split() for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()]
        below = tuple(f"{folder}/" for folder in {tempfile.gettempdir(), "/tmp"})
        return {f"socket:[{r[6]}]": r[7] for r in rows if len(r) == SOCKET_FIELDS and r[7].startswith(below)}
    return {}
