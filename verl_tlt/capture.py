"""Runs inside a user's own command when `verl-tlt doctor`, `warmup` or `compare` runs it.

The command's environment names this module in `VERL_USE_EXTERNAL_MODULES`, which `import verl` imports and does not
guard: an interpreter without verl-tlt stops there and trains nothing. What happens then depends on a second variable:

* `VERL_TLT_CAPTURE` (a file): a process that starts `verl.trainer.main_ppo` writes how it was started into the file,
  and waits until it is ended. Nothing is composed, and no Ray is started. Its environment, which may hold secrets, is
  not written: the command reads it from the process itself.
* `VERL_TLT_APPEND` (a JSON list): such a process appends these overrides to its own, and goes on.

Standard library only: verl is half imported.
"""

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from verl_tlt.flag import MAIN, started_program

CAPTURE, APPEND, MODULES = "VERL_TLT_CAPTURE", "VERL_TLT_APPEND", "VERL_USE_EXTERNAL_MODULES"
RAY_WORKER = "ray._private.workers.default_worker"
"""The program of Ray's workers."""
ENDED_WITHIN_S = 600.0
"""Seconds after which a process that should have been ended ends itself: the command that captures is gone."""


def environment_for(variable: str, value: str, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a command in which this module is to act; `variable` is `CAPTURE` or `APPEND`."""
    modules = [name for name in environment.get(MODULES, "").split(",") if name]
    return {**environment, variable: value, MODULES: ",".join([__name__, *modules])}  # first, before the user's own


def _answer(file: str, said: Mapping[str, Any]) -> NoReturn:
    """Write the answer, and wait to be ended, so that no later line of the script is run."""
    descriptor = os.open(f"{file}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(said, stream)
    os.replace(f"{file}.{os.getpid()}", file)
    time.sleep(ENDED_WITHIN_S)
    os._exit(1)


def _capture(file: str) -> None:
    program = started_program(sys.argv, sys.orig_argv)
    if program.endswith(MAIN):
        _answer(file, {
            "arguments": sys.argv[1:],
            "interpreter": sys.executable,
            "prefix": sys.prefix,
            "directory": os.getcwd(),
            "process": os.getpid(),
        })  # fmt: skip
    if program.startswith(("verl.trainer.", "verl.experimental.")):
        _answer(file, {"other": program})
    if program.endswith(RAY_WORKER):  # started by a program that does not import verl itself
        _answer(file, {"other": "a program that trains in Ray's workers"})

    def init(*args: object, **kwargs: object) -> None:  # another program that trains, such as a recipe's own main
        _answer(file, {"other": "python -c" if sys.argv[0] == "-c" else program or sys.argv[0]})

    import ray  # verl has imported it

    ray.init = init


def with_appended(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """`words` with more overrides behind their last one: Hydra's parser takes overrides in one place only."""
    places = [i for i, word in enumerate(words) if re.match(r"[^-].*=|~", word)]
    place = places[-1] + 1 if places else len(words)
    return [*words[:place], *overrides, *words[place:]]


def _append(overrides: str) -> None:
    if started_program(sys.argv, sys.orig_argv).endswith(MAIN):
        words = with_appended(sys.argv[1:], json.loads(overrides))
        # Both lists grow, since the plugin, which reads the command line next, finds the program by their lengths.
        sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :] = words
        sys.argv[1:] = words
        del os.environ[APPEND]
        modules = [name for name in os.environ.get(MODULES, "").split(",") if name != __name__]
        os.environ[MODULES] = ",".join(modules)


if os.environ.get(CAPTURE):
    _capture(os.environ[CAPTURE])
elif os.environ.get(APPEND):
    _append(os.environ[APPEND])
