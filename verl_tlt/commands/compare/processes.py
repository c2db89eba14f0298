"""A command with all its descendants, however they detach themselves, so that nothing outlives it.

Ray starts daemons in sessions of their own and vLLM starts engine processes; when their parent dies they are adopted by
init and no process group names them any more. Two things catch them: while the command runs, its tree is listed again
and again, and on Linux this process makes itself the one that adopts orphans (`PR_SET_CHILD_SUBREAPER`, prctl(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from verl_tlt.commands.compare.leftovers import ENDING_EVERY_S, EVERY_S, Leftovers
from verl_tlt.files.ownership import open_to_append

PR_SET_CHILD_SUBREAPER = 36

TERM_S = 8.0
"""Seconds for the command itself to end after SIGTERM."""
REST_S = 1.5
"""Seconds for its descendants to end with it, and again after a SIGTERM of their own."""
KILL_S = 10.0
"""Seconds in which SIGKILL must have worked."""


class ProcessTree:
    """Starts `argv` in its own session with its output in `log`. One at a time: orphans are told apart by time.

    The command's `TMPDIR` is a folder of its own; that and the shared memory of its processes go when it is stopped.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None) -> None:
        self._leftovers, self._every_s = Leftovers(), EVERY_S
        self._before = {p.pid for p in psutil.Process().children()}
        self._known: dict[int, psutil.Process] = {}
        _adopt_orphans(True)
        with os.fdopen(open_to_append(log), "ab") as out:
            self.process = subprocess.Popen(
                argv,
                env={**env, "TMPDIR": str(self._leftovers.folder)},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.alive()

    def alive(self) -> list[psutil.Process]:
        """Every living process of the tree; call it now and then while the command runs."""
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                children.setdefault(process.ppid(), []).append(process)
        adopted = [p for p in children.get(os.getpid(), ()) if p.pid not in self._before]
        found, queue = {}, [*adopted, *self._known.values()]
        while queue:
            process = queue.pop()
            if process.pid not in found and _lives(process):
                found[process.pid] = process
                queue += children.get(process.pid, ())
        self._known = found
        self._leftovers.note(found, self._every_s)
        return list(found.values())

    def left_behind(self) -> list[Path]:
        """Files that a tree which has ended by itself did not clear away; `stop` removes them."""
        return self._leftovers.found()

    def stop(self) -> list[int]:
        """End the whole tree, first asked, then told, then killed, and remove what it leaves. Ctrl-C waits for this.

        Returns:
            Process ids that survived even SIGKILL; empty in every healthy case.
        """
        with _uninterrupted():
            self._every_s = ENDING_EVERY_S
            self.alive()
            if self.process.poll() is None:
                self._signal([psutil.Process(self.process.pid)], signal.SIGTERM)
                deadline = time.monotonic() + TERM_S
                while self.process.poll() is None and time.monotonic() < deadline:
                    self.alive()
                    time.sleep(0.05)
            for sent, seconds in ((None, REST_S), (signal.SIGTERM, REST_S), (signal.SIGKILL, KILL_S)):
                self._end(sent, seconds)
            left = [p.pid for p in self.alive()]
            self._leftovers.remove()
            _adopt_orphans(False)
            return left

    def _end(self, sent: signal.Signals | None, seconds: float) -> None:
        """Signal everybody until nobody is left: the dying may still have started someone."""
        deadline, told = time.monotonic() + seconds, set[int]()
        while (alive := self.alive()) and time.monotonic() < deadline:
            if sent is not None and (untold := [p for p in alive if p.pid not in told]):
                told.update(p.pid for p in untold)
                self._signal(untold, sent)
            time.sleep(0.05)
            self._reap()

    def _signal(self, processes: Sequence[psutil.Process], sent: signal.Signals) -> None:
        """Send the signal, and know what everybody owned then: all stand still while that is looked at."""
        still = [*self._known.values()]
        for process in still:
            _send(process, signal.SIGSTOP)
        try:
            self._leftovers.note(self._known, every_s=0)
            for process in processes:
                _send(process, sent)
        finally:
            for process in still:
                _send(process, signal.SIGCONT)

    def _reap(self) -> None:
        """Collect exit states, of the command and of orphans that this process adopted."""
        self.process.poll()
        for child in psutil.Process().children():
            if child.pid not in self._before and child.pid != self.process.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, sent: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(sent)


def _adopt_orphans(on: bool) -> None:
    """Become (or stop being) the parent of orphaned descendants. Elsewhere than on Linux the listing must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and polite terminations for a while (in the main thread, where signals arrive)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """What would interrupt the block does so at its end: around the making of what a `finally` has to know of."""
    came: list[int] = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(n))]
    handlers = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    for first in came[:1]:
        signal.raise_signal(first)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that one `finally` covers them all.

    One that is ignored already stays so: that is what `nohup` asks for.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    handlers = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
