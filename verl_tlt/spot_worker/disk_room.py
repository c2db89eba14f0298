"""Whether a disk has room for a drafter beside the policy's checkpoints, which come first."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from verl_tlt.errors import DrafterError


def tensor_bytes(value: object) -> int:
    """Bytes of all tensors in nested mappings and lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, str) or not isinstance(value, Iterable):
        return 0
    return sum(map(tensor_bytes, value))


def check_room(checkpoint: Path, needed: int) -> None:
    """Raise a `DrafterError` where a disk cannot take `needed` bytes, and then another checkpoint like this one."""
    policy = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    free = shutil.disk_usage(checkpoint).free
    if free < needed + policy:
        raise DrafterError(
            f"{checkpoint} gets no drafter: the disk has {free / 1e9:.3f} GB left, the drafter takes "
            f"{needed / 1e9:.3f} GB, and the policy's next checkpoint about {policy / 1e9:.3f} GB."
        )
