"""The drafter's directories in verl's checkpoints: written after the policy, found by a resumed run, removed when old.

verl writes `global_step_N/actor`, and last of all `latest_checkpointed_iteration.txt`, which names the step to resume
from; the drafter in `global_step_N/tlt_drafter` is written between the two. Where verl keeps only the newest policies,
the drafters of the others go with them.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_tlt.files.disk import CONFIG, remove_model

logger = logging.getLogger(__name__)

CHECKPOINT = "tlt_drafter"
POLICY = "actor"
"""Directories of drafter and policy inside verl's `global_step_N`; verl removes the policy's of old steps."""


def saved_drafter(resume_from: Path | None) -> Path | None:
    """The drafter's directory to resume from, by a `global_step_N` directory, which need not exist; None: none.

    Where that step has none, the newest earlier step's is taken: the run was killed while it wrote the drafter, or went
    on with TLT switched off.
    """
    if resume_from is None:
        return None
    if holds_drafter(resume_from):
        return resume_from / CHECKPOINT
    steps = {_number(p): p for p in resume_from.parent.glob("global_step_*")}
    earlier = [n for n, p in steps.items() if n < _number(resume_from) and holds_drafter(p)]
    if not earlier:
        return None
    drafter = steps[max(earlier)] / CHECKPOINT
    logger.warning(
        "%s has no complete drafter; the run goes on with %s. To start with tlt.drafter.path instead, remove %s from "
        "the checkpoints up to %s", resume_from, drafter, CHECKPOINT, resume_from.name,
    )  # fmt: skip
    return drafter


def holds_drafter(step: Path) -> bool:
    """Whether a checkpoint holds a complete drafter: its config is written last, and removed first."""
    return (step / CHECKPOINT / CONFIG).is_file()


def _number(step: Path) -> float:
    digits = step.name.removeprefix("global_step_")
    return int(digits) if digits.isdecimal() else float("inf")


def remove_halves(step: Path) -> None:
    """Remove what a spot trainer that failed or was killed has written of a drafter in the directory of a step."""
    for half in step.glob(f".{CHECKPOINT}.*"):
        shutil.rmtree(half, ignore_errors=True)


def tidy(step: Path, prunes: bool) -> None:
    """Remove what no run will resume from, once the checkpoint in the directory of a step is complete.

    It is called on the spot trainer's node, which has drafters and policies on its disk, be that shared or its own. The
    newest drafter stays, also without its policy: later steps got none. `prunes`: verl removes old policies. Where it
    does not, a drafter without a policy was put there by the user.
    """
    remove_halves(step)  # also of a run that was killed while it wrote
    if not prunes or not (step / POLICY).is_dir():  # without this step's policy, nothing is known of the others
        return
    steps = [path for path in step.parent.glob("global_step_*") if _number(path) <= _number(step)]
    newer_drafter = False  # whether a newer step than `old` holds a complete drafter
    earlier_has_ours = False  # whether a step before `step` has files of ours, of a complete drafter or not
    for old in sorted(steps, key=_number, reverse=True):
        names = os.listdir(old) if old.is_dir() else []
        has_ours = any(CHECKPOINT in name for name in names)
        if POLICY not in names:
            if earlier_has_ours and not has_ours:
                break  # earlier calls have nearly always seen to the steps before it, which may be thousands
            if newer_drafter or not holds_drafter(old):
                remove_model(old / CHECKPOINT)
            remove_halves(old)
        if holds_drafter(old):
            newer_drafter = True
        if has_ours and old != step:
            earlier_has_ours = True


# Changes verl: patches/README.md#the-drafter-is-in-a-checkpoint-before-verl-names-it-as-the-one-to-resume-from
@contextmanager
def followed(owner: object, method: str, follow: Callable[[], None]) -> Iterator[None]:
    """Call `follow` whenever a method of `owner` has returned, where verl has no hook for it."""
    original = getattr(owner, method)

    def both(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        follow()
        return result

    setattr(owner, method, both)
    try:
        yield
    finally:
        setattr(owner, method, original)
