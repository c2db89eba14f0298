"""The policy's own tensors inside the drafter: embedding, head and final norm.

They are never trained. After every policy update they are copied again, so that the drafter reads and is scored in the
policy's present space. vLLM does the same by sharing its tensors with a drafter whose file carries neither.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verl_tlt.drafter.errors import DrafterError
from verl_tlt.drafter.policy import policy_shape, read_json

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

_NAMES = {"embed": "model.embed_tokens.weight", "lm_head": "lm_head.weight", "norm": "model.norm.weight"}


@dataclass(frozen=True)
class FrozenParts:
    """The policy tensors a drafter needs, any float dtype."""

    embed: torch.Tensor
    """[V, H] input embedding."""
    lm_head: torch.Tensor
    """[V, H] output head; the same object as `embed` where the policy ties them."""
    norm: torch.Tensor
    """[H] weight of the final RMSNorm."""

    @classmethod
    def from_policy_dir(cls, path: str | os.PathLike) -> FrozenParts:
        """Read the three tensors, and no other, from a policy's safetensors files.

        Raises:
            DrafterError: a file or a tensor is missing or unreadable.
        """
        directory = Path(path)
        wanted = dict(_NAMES)
        if policy_shape(directory).tied:
            del wanted["lm_head"]
        tensors = {part: _read(directory, name) for part, name in wanted.items()}
        return cls(tensors["embed"], tensors.get("lm_head", tensors["embed"]), tensors["norm"])


def refresh_frozen(model: Eagle3DraftModel, parts: FrozenParts) -> None:
    """Copy the policy's embedding, head and norm into the drafter, cast to its dtype and device.

    A pruned draft vocabulary takes the rows of the head that it keeps.

    Raises:
        DrafterError: a tensor of another shape than the drafter's.
    """
    head = parts.lm_head
    if model.use_draft_vocab and head.shape[0] == model.verifier_vocab_size:
        head = head[model.t2d.to(head.device)]  # [DV, H]
    pairs = {
        "embed": (model.embed_tokens.weight, parts.embed),
        "lm_head": (model.lm_head.weight, head),
        "norm": (model.verifier_norm.weight, parts.norm),
    }
    for part, (held, given) in pairs.items():
        if held.shape != given.shape:
            raise DrafterError(f"FrozenParts.{part} is {list(given.shape)}, but the drafter's is {list(held.shape)}.")
    with torch.no_grad():
        for held, given in pairs.values():
            held.copy_(given)


def _read(directory: Path, name: str) -> torch.Tensor:
    """One tensor of a policy, from its single file or by its index."""
    from safetensors import SafetensorError, safe_open

    file = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if not file.is_file() and index.is_file():
        owner = read_json(index).get("weight_map", {}).get(name)
        if owner is None:
            raise DrafterError(f"{index} lists no tensor {name!r}.")
        file = directory / owner
    if not file.is_file():
        raise DrafterError(
            f"{file} does not exist: the policy's safetensors are needed for the drafter's frozen parts."
        )
    try:
        with safe_open(file, framework="pt") as reader:
            if name not in reader.keys():  # noqa: SIM118 (a safetensors reader is no mapping)
                raise DrafterError(f"{file} has no tensor {name!r}.")
            return reader.get_tensor(name)
    except SafetensorError as error:
        raise DrafterError(f"{file} is not a complete safetensors file: {error}.") from error
