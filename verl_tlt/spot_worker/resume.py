"""What a learner that goes on from a checkpoint says it holds: checksums, which can be compared with the files.

The checkpoint's training state is the candidate's. The gate compares with the initial drafter as well, which a resumed
run could not know otherwise: what it starts with is the served one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch

from verl_tlt.drafter import DrafterTrainer
from verl_tlt.messages.training import Resumed
from verl_tlt.spot_worker.versions import DrafterVersions

INITIAL = "initial"
"""Key of the initial parameters among those of `DrafterTrainer.state()`; absent where they are the served ones."""


def checksums(trainer: DrafterTrainer, versions: DrafterVersions) -> Resumed:
    """What is held now."""
    return Resumed(
        steps=trainer.steps,
        candidate=checksum(trainer.parameters),
        served=checksum(versions.served),
        initial=checksum(versions.initial),
        moments=moments(trainer.optimizer.state_dict()),
    )


def moments(optimizer: Mapping[str, dict]) -> str:
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
