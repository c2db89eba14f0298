"""What a checkpoint of a run with TLT holds, and what the spot workers of a resumed job said that they went on with."""

import re
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from verl_tlt.drafter import fingerprint, load_training_state
from verl_tlt.drafter.train import AVERAGE
from verl_tlt.messages.training import Resumed
from verl_tlt.spot_worker.merge import INITIAL, checksum, moments
from verl_tlt.trainer.checkpoints import CHECKPOINT

WENT_ON = re.compile(r"spot worker \S+ goes on from \S+: Resumed\((.*?)\)")


@dataclass(frozen=True)
class Saved:
    """What a resumption must go on with."""

    served_file: str
    """Fingerprint of all that engines load."""
    holds: Resumed
    """What spot workers must hold."""


def saved(checkpoints: Path) -> Saved:
    """What lies in the checkpoint that verl is going to resume."""
    step = (checkpoints / "latest_checkpointed_iteration.txt").read_text()
    directory = checkpoints / f"global_step_{step}" / CHECKPOINT
    state, tensors = load_training_state(directory), load_file(directory / "model.safetensors")
    if state is None:
        raise ValueError(f"{directory} holds no training state.")
    served = {name: tensors[name] for name in state["parameters"]}
    holds = Resumed(
        steps=state["steps"],
        candidate=checksum(state[AVERAGE]),
        served=checksum(served),
        initial=checksum(state.get(INITIAL, served)),
        moments=moments(state["optimizer"]),
    )
    return Saved(fingerprint(tensors), holds)


def held_by(said: str) -> list[Resumed]:
    """Of each line in a job's log."""
    found = [dict(re.findall(r"(\w+)='?([0-9a-f]+)'?", fields)) for fields in WENT_ON.findall(said)]
    return [Resumed(**{**one, "steps": int(one["steps"])}) for one in found]
