"""The tensors of the policy that a drafter uses: embedding, output head and final norm; read, and kept current."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl_tlt.drafter.build import make_room
from verl_tlt.drafter.policy import DrafterError, Model, folder, policy_shape, tensor_files
from verl_tlt.drafter.tensor_file import TensorFile

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

_USUAL = {"embed": "model.embed_tokens.weight", "lm_head": "lm_head.weight", "norm": "model.norm.weight"}
_PATTERNS = {
    part: re.compile(rf"(?:(?:base_model|model|language_model)\.)*{ending}\.weight")
    for part, ending in (("embed", "embed_tokens"), ("lm_head", "lm_head"), ("norm", r"(?:model|language_model)\.norm"))
}


def policy_part(name: str) -> str | None:
    """Which part of a policy its tensor is: "embed", "lm_head", "norm" (the final one); None: one of all the others.

    `name` is that of transformers and of verl's weight sync; a vision-language model's decoder is its `language_model`.
    """
    return next((part for part, pattern in _PATTERNS.items() if pattern.fullmatch(name)), None)


@dataclass(frozen=True)
class VerifierWeights:
    """The policy's tensors, any float dtype."""

    embed: torch.Tensor
    """[V, H] input embedding."""
    lm_head: torch.Tensor
    """[V, H] output head; the same object as `embed` where the policy ties them."""
    norm: torch.Tensor
    """[H] what the final RMSNorm multiplies by: its weight, or one more (`PolicyShape.norm_offset`)."""

    @classmethod
    def from_policy_dir(cls, path: Model) -> VerifierWeights:
        """Read the three tensors, and no other, from the safetensors of a policy in a folder or on the hub."""
        shape = policy_shape(path)
        tensors = _read(path, [part for part in _USUAL if not (shape.tied and part == "lm_head")])
        norm = tensors["norm"].float() + shape.norm_offset
        return cls(tensors["embed"], tensors.get("lm_head", tensors["embed"]), norm)


def refresh_verifier_weights(model: Eagle3DraftModel, parts: VerifierWeights) -> None:
    """Copy the policy's embedding, head and norm into the drafter, cast to its dtype and device.

    A pruned draft vocabulary takes the rows of the head that it keeps. A drafter with a head of its own keeps that, and
    takes the policy's for its teacher only.
    """
    head = parts.lm_head
    if model.use_draft_vocab and head.shape[0] == model.verifier_vocab_size:
        head = head[model.t2d.to(head.device)]  # [DV, H]
    pairs = {
        "embed": (model.embed_tokens, parts.embed),
        "lm_head": (model.verifier_lm_head, head),  # one tensor with `lm_head` unless that is its own
        "norm": (model.verifier_norm, parts.norm),
    }
    for part, (module, given) in pairs.items():
        if (held := module.weight.shape) != given.shape:
            raise DrafterError(f"VerifierWeights.{part} is {list(given.shape)}, but the drafter's is {list(held)}.")
    with torch.no_grad():
        for module, given in pairs.values():
            make_room(module).copy_(given)


def _read(policy: Model, parts: Iterable[str]) -> dict[str, torch.Tensor]:
    """The policy's tensors for these parts, from its single file or by its index; no other is read."""
    source, owners = tensor_files(policy)
    tensors = {}
    for part in parts:
        name = next((name for name in owners if policy_part(name) == part), None)
        if name is None:
            raise DrafterError(
                f"{source} has no tensor {_USUAL[part]!r}, nor that of a language model in a larger one."
            )
        with TensorFile(folder(policy, (owners[name],)) / owners[name], "pt") as reader:
            if name not in reader.names:
                raise DrafterError(f"{owners[name]} has no tensor {name!r}, which {source} says it has.")
            tensors[part] = reader.get_tensor(name)
    return tensors
