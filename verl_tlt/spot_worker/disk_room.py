"""Whether a disk has room for a drafter beside the policy's checkpoints, which come first."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from verl_tlt.errors import DrafterError


def tensor_bytes(value: object) -> int:
    """Bytes of all tensors in nested mappings and lists."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def check_room(checkpoint: Path, drafter: str, needed: int) -> None:
    """Raise a `DrafterError` where a disk cannot take `needed` bytes, and then another checkpoint like this one.

    One that verl still writes is taken to become as large as the largest beside it. `drafter`: name of its directory.
    """
    there = _policy_bytes(checkpoint, drafter)
    policy = max([there, *(_policy_bytes(step, drafter) for step in checkpoint.parent.glob("global_step_*"))])
    free = shutil.disk_usage(checkpoint).free
    if free < needed + (policy - there) + policy:
        raise DrafterError(
            f"{checkpoint} gets no drafter: the disk has {free / 1e9:.3f} GB left, the drafter takes "
            f"{needed / 1e9:.3f} GB, and the policy's next checkpoint about {policy / 1e9:.3f} GB."
        )


def _policy_bytes(checkpoint: Path, drafter: str) -> int:
    """Bytes of a checkpoint without its drafter; what is removed meanwhile counts as nothing."""
    total = 0
    for folder, folders, files in os.walk(checkpoint):
        folders[:] = [name for name in folders if drafter not in name]
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total
