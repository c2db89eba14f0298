"""Runs Python commands as processes that need not import torch, Ray and the like again: `python warm_python.py FILE`.

A process that imports verl spends most of its time in other libraries. Here they are imported once, and every command
is a fork from there: verl itself, its plugins and whatever the command does start anew in each. FILE holds JSON,
{name: {"arguments": ["-m", module, ...] or ["-c", code, ...], "environment": {...}}}; what NAME says goes to NAME.out
and NAME.err beside it, its exit status to NAME.status.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch", "torch.utils.tensorboard", "tensordict", "transformers", "accelerate", "peft", "datasets", "ray", "hydra",
    "scipy.stats", "wandb", "megatron.core",
)  # fmt: skip
AT_A_TIME = 2


def become(command: dict[str, Any], into: Path) -> None:
    """Turn this fork into the command, as far as Python code can tell."""
    for descriptor, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(into.with_suffix(f".{suffix}"), os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(command["environment"])
    sys.path[:0] = filter(None, command["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    kind, what, *arguments = command["arguments"]
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def main() -> None:
    """Fork every command, a few at a time; in a fork this returns, or raises, when the command has ended."""
    file = Path(sys.argv[1])
    commands = json.loads(file.read_text())
    for library in LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):  # Megatron and its like are not everywhere
            importlib.import_module(library)
    assert not {"verl", "verl_tlt"} & set(sys.modules), "every command is to import these itself"
    running: dict[int, str] = {}
    for name, command in [*commands.items(), *[("", None)] * AT_A_TIME]:
        if len(running) == AT_A_TIME or (command is None and running):
            pid, status = os.wait()
            file.with_name(f"{running.pop(pid)}.status").write_text(str(os.waitstatus_to_exitcode(status)))
        if command is not None:
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                return become(command, file.with_name(name))
            running[pid] = name


if __name__ == "__main__":
    main()
