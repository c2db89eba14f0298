"""The tensors of the policy that a drafter uses: embedding, output head and final norm; read, and kept current."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl_tlt.drafter.build import drafter_config, has_own_embedding, make_room
from verl_tlt.drafter.model_files import Model, NotHereError
from verl_tlt.drafter.mtp_tensors import mtp_layout
from verl_tlt.drafter.policy import MTP, check_unquantized, policy_shape
from verl_tlt.drafter.tensor_file import Header, check_weights, headers, opened, read_parts, tensor_files
from verl_tlt.errors import DrafterError

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

_USUAL = {"embed": "model.embed_tokens.weight", "lm_head": "lm_head.weight", "norm": "model.norm.weight"}
_PATTERNS = {
    part: re.compile(rf"(?:(?:model|language_model)\.)*{ending}\.weight")
    for part, ending in (("embed", "embed_tokens"), ("lm_head", "lm_head"), ("norm", r"(?:model|language_model)\.norm"))
}


def policy_part(name: str) -> str | None:
    """Which part of a policy a tensor is, by its name: "embed", "lm_head" or "norm" (the final one); None: another."""
    for part, pattern in _PATTERNS.items():
        if pattern.fullmatch(name):
            return part
    return None


@dataclass(frozen=True)
class VerifierWeights:
    """The policy's tensors that a drafter uses, of any float dtype."""

    embed: torch.Tensor  # [V, H] input embedding
    lm_head: torch.Tensor  # [V, H] output head; the same object as `embed` where the policy ties them
    norm: torch.Tensor
    """[H] what the final RMSNorm multiplies by: its weight, or one more (`PolicyShape.norm_offset`)."""

    @classmethod
    def from_policy_dir(cls, path: Model) -> VerifierWeights:
        """Read the three tensors, and no other, from the safetensors of a policy in a folder or on the hub."""
        shape = policy_shape(path)
        tensors = read_parts(locate_parts(path))
        embed = tensors["embed"]
        head = tensors.get("lm_head", embed)
        if shape.tied and torch.equal(head, embed):
            head = embed  # one object, so that the copy in the files takes no memory
        norm = tensors["norm"].float() + shape.norm_offset
        return cls(embed, head, norm)


def refresh_verifier_weights(model: Eagle3DraftModel, parts: VerifierWeights) -> None:
    """Copy the policy's embedding, head and norm into the drafter, cast to its dtype and device.

    With a pruned draft vocabulary only the head's rows for these tokens are copied. An embedding of the drafter's own
    stays, and so does its own head: the policy's head, by which it is trained, is a tensor beside that.
    """
    head = parts.lm_head
    if model.use_draft_vocab and head.shape[0] == model.verifier_vocab_size:
        head = head[model.t2d.to(head.device)]  # [DV, H]
    pairs = {
        "embed": (model.embed_tokens, parts.embed),
        "lm_head": (model.verifier_lm_head, head),  # one tensor with `lm_head` unless that is its own
        "norm": (model.verifier_norm, parts.norm),
    }
    if has_own_embedding(model):
        del pairs["embed"]
    for part, (module, given) in pairs.items():
        shape = module.weight.shape
        if shape != given.shape:
            raise DrafterError(f"VerifierWeights.{part} is {list(given.shape)}, but the drafter's is {list(shape)}.")
    with torch.no_grad():
        for module, given in pairs.values():
            make_room(module).copy_(given)


def locate_parts(policy: Model, fetch: bool = True) -> dict[str, Header]:
    """Headers of a policy's embedding, head and final norm; a `DrafterError` where one does not fit.

    A tied policy need not have a head in its files; if it has one, transformers takes it.
    """
    shape = policy_shape(policy)
    source, owners = tensor_files(policy, fetch)
    table = [shape.vocab_size, shape.hidden_size]
    norm = [shape.hidden_size]
    names: dict[str, str] = {}  # of each part, the first one that is found
    for name in owners:
        part = policy_part(name)
        if part is not None:
            names.setdefault(part, name)
    for wanted, usual in _USUAL.items():
        if wanted not in names and not (shape.tied and wanted == "lm_head"):
            raise DrafterError(f"{source} has no tensor {usual!r}, nor that of a language model in a larger one.")
    in_files = headers(policy, source, {name: owners[name] for name in names.values()}, fetch)
    parts = {part: in_files[name] for part, name in names.items()}
    for part, header in parts.items():
        header.must_be(norm if part == "norm" else table, "the policy's config")
    return parts


def is_trained(rows: torch.Tensor, tokens: torch.Tensor, policy: Model, part: str) -> bool:
    """Whether a drafter's rows, [n, H], differ from the policy's for these tokens, int64 [n], by more than a cast.

    `part`: "lm_head" or "embed".
    """
    parts = locate_parts(policy)
    header = parts.get(part, parts["embed"])
    with opened(header.file) as reader:
        policy_rows = reader.get_tensor(header.name)[tokens].float()
    difference = (rows.float() - policy_rows).norm()
    return bool(difference > 0.01 * policy_rows.norm())  # a cast to 16 bits makes 0.002, training far more


def check_policy_files(policy: Model, method: str = "eagle3", fetch: bool = True) -> bool:
    """Check that a policy has all that a drafter takes from it; a `DrafterError` says what it lacks.

    Only config and headers are read. Returns whether its weights are here, or on the hub if `fetch`.
    """
    shape = policy_shape(policy)
    if method == MTP:
        mtp_layout(shape)
    else:
        drafter_config(shape)
    try:
        check_unquantized(policy)
        check_weights(policy)
        locate_parts(policy, fetch)
    except NotHereError:  # some of the files are not here
        return False
    return True
