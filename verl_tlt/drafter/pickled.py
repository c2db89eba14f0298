"""What others pickled, read as tensors and plain values: for `verl-tlt convert`, which a person starts, and for no run.

SafeAILab's drafters are `pytorch_model.bin`, and checkpoints of release 0.1 held a `training_state.pt`. Torch's reader
with `weights_only` runs no code that a file names, but it interprets a program all the same and has had holes. So a run
reads safetensors alone, and whoever trusts a pickled file has it rewritten once.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from verl_tlt.drafter.check import WEIGHTS
from verl_tlt.drafter.hub import Model, folder
from verl_tlt.errors import DrafterError

PICKLED = "pytorch_model.bin"
EARLIER_STATE = ("training/training_state.pt", "training_state.pt")
"""Where releases up to 0.1 kept the optimizer."""


def pickled_weights(drafter: Model) -> tuple[Path, dict[str, torch.Tensor] | None]:
    """(folder of a drafter, its tensors where they are pickled, else None), fetched where it is a name on the hub.

    Raises:
        DrafterError: there is no such drafter, its file is damaged or holds anything but tensors.
    """
    path = folder(drafter, (WEIGHTS, PICKLED), besides=("config.json", "provenance.json"))
    if (path / WEIGHTS).is_file() or not (path / PICKLED).is_file():
        return path, None
    return path, _read(path / PICKLED)


def pickled_state(directory: Path) -> dict[str, Any] | None:
    """The `DrafterTrainer.state()` that release 0.1 left beside a drafter; None where there is none.

    Raises:
        DrafterError: the file is damaged, or holds anything but tensors and plain values.
    """
    found = next((directory / name for name in EARLIER_STATE if (directory / name).is_file()), None)
    return None if found is None else _read(found)


def _read(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise DrafterError(f"{file} is damaged, or not only tensors: {str(error).splitlines()[0]}") from error
