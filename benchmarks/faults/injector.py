"""Makes one function of one process fail at a given RL step, from outside: the product has no hook for it.

Every process of a run arms this when Python starts (`inject/sitecustomize.py`). A fault names a function; once its
module is imported the function is wrapped. A call of it in the fault's step, or in the first later step that has any,
does what the fault says instead; where an earlier fault struck late, later ones do (`plan.waits_for`), so that each has
the steps by which it is judged. The directory `TLT_FAULTS` holds what processes have to know of each other: `plan`
(the step of each fault), `step` (the RL step that is going on), and `fired-NAME` (step and pid of what it has struck).
"""

import functools
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from benchmarks.faults import actions
from benchmarks.faults.plan import (
    BOUNDS,
    ENGINE_KILLED,
    FAULTS,
    NAN_LIVE,
    SERVER_KILLED,
    STOPPED_IN_SCORING,
    Fault,
    waits_for,
)

DIRECTORY = "TLT_FAULTS"
EVERY = (*FAULTS, STOPPED_IN_SCORING, SERVER_KILLED, ENGINE_KILLED, NAN_LIVE)


def arm() -> None:
    """Wrap what the plan's faults name, as modules arrive."""
    folder = Path(os.environ[DIRECTORY])
    planned = json.loads((folder / "plan").read_text())
    register_post_import_hook(functools.partial(_note_steps, folder), "verl.trainer.ppo.v1.trainer_base")
    for fault in EVERY:
        if fault.name in planned:
            for target in fault.targets:
                due, before = replace(fault, step=planned[fault.name]), waits_for(fault, planned, EVERY)
                wrap = functools.partial(_wrap, folder, due, target, before)
                register_post_import_hook(wrap, target.partition(":")[0])
    for bound, seconds in BOUNDS.items():
        name, _, attribute = bound.partition(":")
        register_post_import_hook(functools.partial(_set, attribute, seconds), name)


def _set(attribute: str, value: float, module: ModuleType) -> None:
    if not hasattr(module, attribute):
        raise AttributeError(f"{module.__name__} has no {attribute}")
    setattr(module, attribute, value)


def _note_steps(folder: Path, module: Any) -> None:
    original = module.PPOTrainer.on_step_begin

    @functools.wraps(original)
    def on_step_begin(trainer: Any) -> None:
        scratch = folder / f"step.{os.getpid()}"
        scratch.write_text(str(trainer.global_steps))
        scratch.replace(folder / "step")
        original(trainer)

    module.PPOTrainer.on_step_begin = on_step_begin


def now(folder: Path) -> int:
    """The RL step that is going on; 0: none yet."""
    try:
        return int((folder / "step").read_text())
    except FileNotFoundError:
        return 0


def _wrap(folder: Path, fault: Fault, target: str, before: Mapping[str, int], module: ModuleType) -> None:
    owner: Any = module
    *path, name = target.partition(":")[2].split(".")
    for part in path:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    calls: dict[int, int] = {}

    def strikes() -> bool:
        step = now(folder)
        if step < fault.step:
            return False
        if any(step < _struck(folder / f"fired-{note}", otherwise=step) + gap for note, gap in before.items()):
            return False
        calls[step] = calls.get(step, 0) + 1
        if not fault.first <= calls[step] < fault.first + fault.times:
            return False
        return _claim(folder / f"fired-{fault.note(target)}", step, fault)

    act: Callable[..., Any] = functools.partial(getattr(actions, fault.action), original)

    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = act(*args, **kwargs) if strikes() else original(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
    else:

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return act(*args, **kwargs) if strikes() else original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _struck(note: Path, otherwise: int) -> int:
    """The step in which a fault struck; `otherwise`: it has not yet."""
    try:
        return int(note.read_text().split()[0])
    except FileNotFoundError:
        return otherwise


def _claim(note: Path, step: int, fault: Fault) -> bool:
    """Whether this process is one that the fault strikes in this step: the first to ask, its successor, or any."""
    line, mine = f"{step} {os.getpid()}\n", os.getpid()
    scratch = note.with_name(f"{mine}-{threading.get_ident()}-{note.name}")
    scratch.write_text(line)
    try:
        os.link(scratch, note)  # whole, or not there
    except FileExistsError:
        struck = [tuple(map(int, entry.split())) for entry in note.read_text().splitlines()]
        (begin, first), pids = struck[0], {pid for _, pid in struck}
        here = step == begin and (fault.everywhere or first == mine)
        successor = step > begin and mine not in pids and len(pids) < fault.sessions
        if not (here or successor):
            return False
        with note.open("a") as file:
            file.write(line)
    finally:
        scratch.unlink()
    return True
