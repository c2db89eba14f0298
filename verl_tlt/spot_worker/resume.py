"""What a learner keeps in a checkpoint besides the served drafter, and how it goes on from one.

The trainer's state is of the candidate. The gate compares with the initial drafter as well, which a resumed run could
not know otherwise: what it starts with is the served one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from verl_tlt.drafter import DrafterTrainer
from verl_tlt.messages.training import Parameters, Resumed

INITIAL = "initial"
"""Key of the initial parameters among those of `DrafterTrainer.state()`; absent where they are the served ones."""


def state_of(trainer: DrafterTrainer, kept: Mapping[str, Parameters]) -> dict[str, Any]:
    """What to save: a copy, except of the `kept` parameters, which are never written to."""
    state = trainer.state()
    if kept["initial"] is not kept["served"]:
        state[INITIAL] = {name: torch.from_numpy(value) for name, value in kept["initial"].items()}
    return state


def go_on(trainer: DrafterTrainer, kept: dict[str, Parameters], state: dict[str, Any]) -> Parameters:
    """Load a saved state into the trainer and the initial parameters into `kept`; returns the candidate's.

    Raises:
        DrafterError: the state is of a drafter with other parameters.
    """
    trainer.load_state(state)
    if INITIAL in state:
        kept["initial"] = {name: value.numpy() for name, value in state[INITIAL].items()}
    return trainer.parameters_numpy()


def account(trainer: DrafterTrainer, kept: Mapping[str, Parameters]) -> Resumed:
    """What is held now, in a form that can be compared with a checkpoint's files."""
    return Resumed(
        steps=trainer.steps,
        candidate=checksum(trainer.parameters),
        served=checksum(kept["served"]),
        initial=checksum(kept["initial"]),
        moments=moments(trainer.optimizer.state_dict()),
    )


def moments(optimizer: Mapping[str, Any]) -> str:
    """Checksum of Adam's moments and step counts, from the optimizer's `state_dict()`."""
    states = optimizer["state"].items()
    return checksum({f"{number}.{name}": value for number, values in states for name, value in values.items()})


def checksum(named: Mapping[str, torch.Tensor | np.ndarray]) -> str:
    """CRC-32 of names and numbers: a resumption waits for it, and a `fingerprint` takes thirteen times as long."""
    whole = 0
    for name in sorted(named):
        value = named[name]
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        whole = zlib.crc32(name.encode(), whole)
        whole = zlib.crc32(np.ascontiguousarray(array).reshape(-1).data.cast("B"), whole)
    return f"{whole:08x}"
