"""Starts test processes faster: each is a fork of a server that has already imported torch, transformers and others.

A whole run starts a dozen Python processes, and each spends most of its first quarter minute in other people's imports.
Here one process, the server, imports them once. A process that Ray, multiprocessing or a command of ours starts meets
`hand_over` before its first line (sitecustomize): it gives its arguments, environment, folder and open files to the
server, whose fork goes on as if it were that process. What has been given over stays in the process table for its
parent: signals pass through it, it ends with the fork's status, and its end ends the fork. ray, verl, vllm and verl_tlt
are never imported ahead: they are what is tested, and read the environment at import.

A process starts by itself where it cannot be a fork: without a server, in another virtual environment, or if something
differs that counts when a library is loaded (`COUNTS`). `TLT_TESTS_FORK=0` has all do.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ADDRESS = "TLT_TESTS_FORK"
"""Environment variable: the server's socket."""
ENGINES = "commands.warmup.engine commands.doctor.engine_check lossless.child"
MARKS = os.environ.get("TLT_TESTS_FORKED", f"default_worker.py multiprocessing.spawn {ENGINES}").split()
"""In the arguments of those that may be forks: Ray's workers, what multiprocessing spawns, our commands' engines."""
LIBRARIES = (
    "torch", "tensordict", "transformers.modeling_layers", "transformers.models.auto.auto_factory",
    "transformers.configuration_utils", "transformers.tokenization_utils_base", "torch._inductor.lowering",
    "torch._inductor.compile_fx", "torch.utils.cpp_extension", "scipy.signal", "scipy.stats", "pandas",
    "openai.types.responses.response_function_tool_call_output_item", "cv2", "av", "fastapi", "uvicorn", "aiohttp",
    "mistral_common.protocol.instruct.validator", "compressed_tensors.quantization", "jsonschema", "requests",
    "xgrammar.structural_tag", "zmq", "omegaconf", "nvtx", "openai_harmony", "llguidance", "prometheus_client", "peft",
    "accelerate", "hydra", "wandb", "datasets", "speculators",
)  # fmt: skip
COUNTS = ("LD_PRELOAD", "OMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_", "PYTHONHASHSEED", "HF_", "TRANSFORMERS_", "TORCH_")
BEFORE = dict(os.environ)
"""Before libraries were imported, which set variables of their own."""
FIRST_FREE = 256
"""Descriptors from here on are nobody's while a fork puts its own in place."""
FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT,
)  # fmt: skip


def _decisive(environment: Mapping[str, str]) -> dict[str, str]:
    """What must be the same. Libraries to be loaded first are of no account where they are loaded anyway."""
    found = {name: value for name, value in environment.items() if name.startswith(COUNTS)}
    loaded = Path("/proc/self/maps").read_text()
    if all(library in loaded for library in found.get("LD_PRELOAD", "").split(":")):
        found.pop("LD_PRELOAD", None)
    return found


# ---------------------------------------------------------------------- the process that is given over


def hand_over() -> None:
    """Become a fork of the server, if this process may: then this does not return."""
    address = os.environ.get(ADDRESS, "0")
    if address == "0" or not any(mark in argument for argument in sys.orig_argv for mark in MARKS):
        return
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(address)
    except OSError:
        return
    mine = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    mine = [fd for fd in mine if fd != server.fileno() and os.path.exists(f"/proc/self/fd/{fd}")]
    request = {
        "argv": sys.orig_argv, "environment": dict(os.environ), "cwd": os.getcwd(), "path": sys.path, "files": mine,
        "nice": os.getpriority(os.PRIO_PROCESS, 0), "prefix": sys.prefix, "parent": os.getppid(),
    }  # fmt: skip
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # what comes before it can be passed on waits
    try:
        with os.fdopen(os.memfd_create("request"), "w+") as file:  # an environment is longer than a message
            json.dump(request, file)
            file.flush()
            socket.send_fds(server, [b"start"], [file.fileno(), *mine])
        started = server.recv(16) == b"started"
    except OSError:  # the server has ended
        started = False
    if started:
        for sent in FORWARDED:
            signal.signal(sent, lambda number, _: server.send(struct.pack("i", number)))
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if not started:
        server.close()
        return
    for fd in mine:
        os.close(fd)
    status = server.recv(16)
    code = struct.unpack("i", status)[0] if status else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---------------------------------------------------------------------- the server


class Server:
    """Forks for those who ask at `address`, until standard input ends; then all of them end."""

    def __init__(self, address: str) -> None:
        self.forks: dict[int, socket.socket] = {}
        """By process id: who waits for its end."""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"{address}.new")
        self.listener.listen(64)
        os.rename(f"{address}.new", address)
        self.ended, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.watched = selectors.DefaultSelector()
        for source in (self.listener, self.ended, 0):
            self.watched.register(source, selectors.EVENT_READ)

    def serve(self) -> None:
        """In a fork this does not return."""
        while True:
            for key, _ in self.watched.select():
                if key.fileobj is self.listener:
                    self.watched.register(self.listener.accept()[0], selectors.EVENT_READ)
                elif key.fileobj == self.ended:
                    os.read(self.ended, 4096)
                    self._collect()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
                else:
                    for pid in self.forks:
                        os.kill(pid, signal.SIGKILL)
                    return

    def _hear(self, client: socket.socket) -> None:
        """A signal to pass on, what somebody would like to become, or its end."""
        said, files = b"", []
        with contextlib.suppress(OSError):
            said, files, *_ = socket.recv_fds(client, 16, 250)
        pid = next((pid for pid, its in self.forks.items() if its is client), None)
        if said == b"start":
            self._fork(client, files)
        elif said and pid is not None:
            os.kill(pid, struct.unpack("i", said)[0])
        elif pid is not None:
            self.watched.unregister(client)
            os.kill(pid, signal.SIGKILL)  # somebody ended the process in whose name it lives
        else:
            self._forget(client)

    def _fork(self, client: socket.socket, files: list[int]) -> None:
        with os.fdopen(files[0]) as file:
            file.seek(0)
            request = json.load(file)
        same = request["prefix"] == sys.prefix and _decisive(request["environment"]) == _decisive(BEFORE)
        alone = len(os.listdir("/proc/self/task")) == 1  # a fork has the calling thread only
        pid = os.fork() if same and alone else None
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for key in [*self.watched.get_map().values()]:
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.detach()  # the numbers of its files will be others'
            self.watched.close()
            _live(partial(_become, request, files[1:]))
        if pid is not None:
            self.forks[pid] = client
        with contextlib.suppress(OSError):  # it is gone already, which will be heard of
            client.send(b"started" if pid is not None else b"no")
        for fd in files[1:]:
            os.close(fd)

    def _collect(self) -> None:
        """Tell those who wait how their forks ended."""
        while self.forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            client = self.forks.pop(pid)
            with contextlib.suppress(OSError):
                client.send(struct.pack("i", os.waitstatus_to_exitcode(status)))
            self._forget(client)

    def _forget(self, client: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it was forgotten before
            self.watched.unregister(client)
        client.close()


def main() -> None:
    """`python fork_server.py SOCKET [LIBRARY ...]`."""
    for library in sys.argv[2:] or LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):  # not everything is everywhere
            importlib.import_module(library)
    gc.freeze()
    Server(sys.argv[1]).serve()


# ---------------------------------------------------------------------- the fork


def _live(life: Callable[[], None]) -> NoReturn:
    """To the end of a process, but for the interpreter's own: to take so many modules apart takes seconds."""
    code = 0
    try:
        life()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Turn this fork into the process that asked, as far as Python code can tell, and run it to its end."""
    global MARKS
    free = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for fd in files]
    os.closerange(3, FIRST_FREE)
    for fd, place in zip(free, request["files"], strict=True):
        os.dup2(fd, place, inheritable=True)
        os.close(fd)
    os.setsid()  # Ray kills a worker's process group when the worker ends, and this one's was the server's
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.chdir(request["cwd"])
    os.getppid = lambda: request["parent"]
    set_by_libraries = {name: value for name, value in os.environ.items() if BEFORE.get(name) != value}
    os.environ.clear()
    os.environ.update(set_by_libraries | request["environment"])
    sys.path[:], sys.orig_argv[:] = request["path"], request["argv"]
    sys.modules["fork_server"] = sys.modules["__main__"]  # which the coming import would find, and hand over to again
    MARKS = []
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")  # its own one
    tempfile.tempdir = None  # libraries had it found in the server's environment
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own random numbers begin anew by themselves
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    arguments = iter(request["argv"][1:])
    what = next(arguments)
    while what.startswith("-") and what not in ("-c", "-m"):
        if what in ("-X", "-W"):
            next(arguments)
        if what == "-u":
            sys.stdout.reconfigure(write_through=True)
        what = next(arguments)
    main = sys.modules["__main__"] = ModuleType("__main__")
    if what == "-c":
        code, sys.argv = next(arguments), ["-c", *arguments]
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif what == "-m":
        module = next(arguments)
        sys.argv = ["-m", *arguments]
        if "-P" not in request["argv"]:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *arguments]
        sys.path.insert(0, str(Path(what).resolve().parent))
        main.__file__ = what
        exec(compile(Path(what).read_bytes(), what, "exec"), main.__dict__)


if __name__ == "__main__":
    main()
