"""Runs a command of which no process is left when it is stopped, however its processes detach.

Ray starts daemons in sessions of their own and vLLM starts engine processes; when their parent dies init would adopt
them, and no process group names them any more. So this process makes itself the one that adopts orphans
(`PR_SET_CHILD_SUBREAPER`, prctl(2)): all that the command started are its children or theirs.

A command gets a temporary folder of its own (Ray's session, vLLM's sockets, everybody's `tempfile`), which is removed,
unless it is only captured: then what a recipe's script makes there must stay.
Shared memory is removed by Python's own resource trackers, which are therefore ended last.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from verl_tlt.commands.interrupts import deferred_interrupts, interruptible
from verl_tlt.errors import TLTError
from verl_tlt.flag import dotted

PR_SET_CHILD_SUBREAPER = 36
SETTLE_S = 1.0
"""Seconds for what a command has left in the background to start its program."""
TERM_S = 8.0
"""Seconds for the command itself to end after SIGTERM."""
REST_S = 1.5
"""Seconds for the command's descendants to end with it, and again after a SIGTERM of their own."""
KILL_S = 10.0
"""Seconds in which SIGKILL must have worked."""
TRACKER_S = 2.0
"""Seconds for resource trackers to remove what the killed processes have left."""
LONGEST_BASE = 21
"""Most characters of a temporary folder in which the paths of Ray's sockets have no more than Linux takes (107): after
it they have 86, as in `/verl-tlt-12345678/ray/session_2026-11-30_13-44-00_123456_1234567/sockets/plasma_store`."""


@contextlib.contextmanager
def running(argv: Sequence[str], *, log: Path, **more: Any) -> Iterator[ProcessTree]:
    """Run a command while the block runs; on any way out, by a signal too, its whole process tree is ended.

    The arguments are those of `ProcessTree`. A TLTError says that a process could not be ended.
    """
    tree: ProcessTree | None = None
    with interruptible():
        try:
            with deferred_interrupts():
                tree = ProcessTree(argv, log=log, **more)
            yield tree
        finally:
            left = [] if tree is None else tree.stop()
            if left:
                raise TLTError(f"These processes could not be ended: {', '.join(map(str, left))}. Their log is {log}.")


class ProcessTree:
    """Starts `argv` in its own session, its output in `log`.

    This process may have one tree at a time: every orphan that it adopts in the meantime counts as a part of the tree.

    `own_tmpdir`: its `TMPDIR` is `folder`, which `stop` removes. It keeps the open files `keeps`, such as a lock, which
    then lasts as long as the command, also if this process is killed.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
        own_tmpdir: bool = True,
        keeps: Sequence[int] = (),
    ) -> None:
        base = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="verl-tlt-", dir=base if len(base) <= LONGEST_BASE else "/tmp"))
        self._before = set(psutil.Process().children())
        self._ended = 0.0
        _adopt_orphans(True)
        own = {**env, "TMPDIR": str(self.folder)} if own_tmpdir else env
        try:
            with log.open("ab") as out:
                self.process = subprocess.Popen(
                    argv, env=own, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                    pass_fds=tuple(keeps),
                )  # fmt: skip
        except BaseException:
            self.folder.rmdir()
            _adopt_orphans(False)
            raise

    def alive(self) -> list[psutil.Process]:
        """Every living process of the tree."""
        descendants = set(psutil.Process().children(recursive=True))
        for other in self._before:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendants -= {other, *other.children(recursive=True)}
        return [process for process in descendants if _lives(process)]

    def status(self, program: str) -> int | None:
        """The command's exit status; None while it runs, or a `program` that it has left in the background does."""
        code = self.process.poll()
        if code != 0:
            return code
        if not self._ended:
            self._ended = time.monotonic()
        in_background = any(runs(process, program) for process in self.alive())
        if in_background or time.monotonic() < self._ended + SETTLE_S:
            return None
        return code

    def stop(self) -> list[int]:
        """End the whole tree: SIGTERM to the command, to all, then SIGKILL. Removes its folder; Ctrl-C waits for this.

        Returns the ids of processes that survived even SIGKILL: none in every healthy case.
        """
        with deferred_interrupts():
            self._end(lambda: [p for p in self.alive() if p.pid == self.process.pid], signal.SIGTERM, TERM_S)
            self._end(self.alive, None, REST_S)
            self._end(self.alive, signal.SIGTERM, REST_S)
            self.kill()
            shutil.rmtree(self.folder, ignore_errors=True)
            _adopt_orphans(False)
            return [process.pid for process in self.alive()]

    def kill(self) -> None:
        """Kill every process at once: no later line of a script is run, and no trap of it."""
        with deferred_interrupts():
            self._end(lambda: [p for p in self.alive() if not _is_tracker(p)], signal.SIGKILL, KILL_S)
            self._end(self.alive, None, TRACKER_S)
            self._end(self.alive, signal.SIGKILL, KILL_S)

    def _end(self, chosen: Callable[[], list[psutil.Process]], sent: signal.Signals | None, seconds: float) -> None:
        """Wait until no process is `chosen` any more, for so many seconds at most; None: no signal is `sent`.

        Each process is signalled once. They are chosen again and again, because a dying one may start another.
        """
        deadline = time.monotonic() + seconds
        signalled: set[int] = set()
        while time.monotonic() < deadline and (left := chosen()):
            for process in left:
                if sent is not None and process.pid not in signalled:
                    signalled.add(process.pid)
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # another user's program
                        process.send_signal(sent)
            time.sleep(0.05)
            self._reap()

    def _reap(self) -> None:
        self.process.poll()
        for child in set(psutil.Process().children()) - self._before:  # orphans, which this process adopted
            if child.pid != self.process.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def runs(process: psutil.Process, program: str) -> bool:
    """Whether a word of a process's command is a Python module of this name, or its file."""
    try:
        return any(dotted(word).endswith(program) for word in process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it is a resource tracker of Python's multiprocessing, which ends when those that it serves have ended."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
