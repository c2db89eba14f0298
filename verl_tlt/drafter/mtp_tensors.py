"""A policy's own head for multi-token prediction (MTP) on disk: what it is called, its tensors, and where they go back.

The head is one decoder layer behind a projection of embedding and hidden state. A release has it among the policy's
tensors; transformers leaves it out when it loads and saves the policy, so a trained policy has lost it. Needs no torch,
except to write.

Sources: vLLM's `qwen3_5_mtp.py` and `mimo_mtp.py`, which load it by the names used here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tlt.drafter.policy import (
    CONFIG,
    INDEX,
    DrafterError,
    Model,
    PolicyShape,
    folder,
    policy_shape,
    read_json,
    read_model_config,
    tensor_files,
)
from verl_tlt.drafter.tensor_file import TensorFile
from verl_tlt.drafter.tensors import FLOATS
from verl_tlt.ownership import check_writable, replacing

if TYPE_CHECKING:
    import torch

SHARD = "model-mtp.safetensors"
"""The file that `write_back` adds to a policy."""
_EXPERTS = ("qwen3_next", "qwen3_5_moe", "glm4_moe", "deepseek_v3", "deepseek_v32")
"""How the types of policies begin whose head is a layer of experts."""


@dataclass(frozen=True)
class MTPLayout:
    """How policies of one family hold their head."""

    prefix: str
    """How the names of its tensors begin."""
    count: str
    """The field of the policy's config that says how many MTP layers there are."""
    block: str
    """How the names of its decoder layer's tensors begin."""
    projection: str
    norms: tuple[str, str, str]
    """Of the embedding, of the hidden state, and the final one."""
    gated: bool
    """Attention as in Qwen3.5: queries come with gates, and queries and keys are normed; else as in Qwen2: biased."""


QWEN3_5 = MTPLayout(
    "mtp.", "mtp_num_hidden_layers", "mtp.layers.0.", "mtp.fc",
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), gated=True,
)  # fmt: skip
_MIMO = "model.mtp_layers.0."
MIMO = MTPLayout(
    "model.mtp_layers.", "num_nextn_predict_layers", _MIMO, f"{_MIMO}input_proj",
    (f"{_MIMO}token_layernorm", f"{_MIMO}hidden_layernorm", f"{_MIMO}final_layernorm"), gated=False,
)  # fmt: skip
LAYOUTS = {"MiMoForCausalLM": MIMO, "Qwen3_5ForCausalLM": QWEN3_5, "Qwen3_5ForConditionalGeneration": QWEN3_5}
"""By architecture: policies whose head drafts and is trained, each tested with a small model."""


def mtp_layout(shape: PolicyShape) -> MTPLayout:
    """How this policy holds its head; a `DrafterError` where it has none that drafts here."""
    architecture = next(iter(shape.architectures), None)
    if (layout := LAYOUTS.get(str(architecture))) is not None:
        return layout
    why = "heads that are a layer of experts are left out, since vLLM and transformers store experts differently"
    others = f"; {why}" if shape.model_type.startswith(_EXPERTS) else ""
    raise DrafterError(
        f"{shape.source} names {architecture}, and method=mtp drafts for {', '.join(LAYOUTS)} alone{others}."
    )


def head_shapes(shape: PolicyShape) -> dict[str, list[int]]:
    """The shape of each tensor of the head, by its name in the policy's checkpoint."""
    layout, hidden, inner = mtp_layout(shape), shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    block, attention, mlp = layout.block, f"{layout.block}self_attn.", f"{layout.block}mlp."
    wanted = {
        f"{layout.projection}.weight": [hidden, 2 * hidden],
        **{f"{norm}.weight": [hidden] for norm in layout.norms},
        f"{block}input_layernorm.weight": [hidden],
        f"{block}post_attention_layernorm.weight": [hidden],
        f"{attention}q_proj.weight": [2 * queries if layout.gated else queries, hidden],
        f"{attention}k_proj.weight": [keys, hidden],
        f"{attention}v_proj.weight": [keys, hidden],
        f"{attention}o_proj.weight": [hidden, queries],
        f"{mlp}gate_proj.weight": [inner, hidden],
        f"{mlp}up_proj.weight": [inner, hidden],
        f"{mlp}down_proj.weight": [hidden, inner],
    }
    if layout.gated:
        return wanted | {f"{attention}{norm}.weight": [shape.head_dim] for norm in ("q_norm", "k_norm")}
    return wanted | {f"{attention}{x}_proj.bias": [n] for x, n in (("q", queries), ("k", keys), ("v", keys))}


def mtp_tensors(policy: Model, fetch: bool = True) -> dict[str, Path]:
    """The file of each tensor of the head among a policy's own, by name; of a hub's, fetched if `fetch`.

    A `DrafterError` where there is no head that an engine drafts with.
    """
    config, shape = read_model_config(policy, fetch=fetch), policy_shape(policy)
    layout = mtp_layout(shape)
    if (layers := (config.get("text_config") or config).get(layout.count) or 0) != 1:
        raise DrafterError(f"{shape.source} says {layout.count}={layers}, and an MTP head that drafts has one layer.")
    return head_files(policy, shape, fetch)


def head_files(source: Model, shape: PolicyShape, fetch: bool = True) -> dict[str, Path]:
    """The file of each tensor of the head in `source`: the policy, or a folder that a head was saved in.

    Every one is there with its shape, and there is no other of its kind; a `DrafterError` otherwise.
    """
    layout, wanted = mtp_layout(shape), head_shapes(shape)
    listing, owners = tensor_files(source, fetch)
    held = {name: file for name, file in owners.items() if name.startswith(layout.prefix)}
    if not held:
        raise DrafterError(
            f"{listing} holds no MTP head ({layout.prefix}*), as after save_pretrained of transformers: put one back "
            "with verl-tlt write-back HEAD POLICY, or set tlt.drafter.method=eagle3."
        )
    if different := sorted(held.keys() ^ wanted.keys()):
        said = "holds" if different[0] in held else "lacks"
        raise DrafterError(f"{listing} {said} {different[0]}: that is no head of one dense layer, as its config says.")
    paths = {file: folder(source, (file,), fetch=fetch) / file for file in set(held.values())}
    for file, path in paths.items():
        with TensorFile(path, "np") as reader:
            there = set(reader.names)
            for name in (name for name, owner in held.items() if owner == file):
                if name not in there:
                    raise DrafterError(f"{path} has no tensor {name!r}, which {listing} says it has.")
                if (size := reader.shape(name)) != wanted[name]:
                    raise DrafterError(f"{path}: {name} is {size}, but the policy's config asks for {wanted[name]}.")
                if (kind := reader.kind(name)) not in FLOATS:
                    raise DrafterError(f"{path}: {name} holds {kind}, but must hold {' or '.join(FLOATS)}.")
    return {name: paths[file] for name, file in held.items()}


def read_head(source: Model, shape: PolicyShape) -> dict[str, torch.Tensor]:
    """The tensors of the head in `source`, checked (`head_files`), on the host."""
    files = head_files(source, shape)
    tensors: dict[str, torch.Tensor] = {}
    for path in set(files.values()):
        with TensorFile(path, "pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name, file in files.items() if file == path}
    return tensors


def write_back(head: Model, policy: str | os.PathLike[str]) -> Path:
    """Put a head into a policy's folder, where vLLM drafts with it by the method `mtp`; returns the file it is in.

    The policy's other tensors stay as they are; an older head in its files is taken out of them. The head gets the
    dtype of the policy's embedding. Each file is replaced whole, and is never half of two.

    Raises:
        DrafterError: the head is not one of this policy's shape, or the folder is not one to write to.
    """
    from safetensors.torch import save

    directory = Path(policy)
    if not (directory / CONFIG).is_file():
        raise DrafterError(f"{directory} is no folder of a policy: it has no {CONFIG}.")
    check_writable(directory, "the policy's folder")
    shape = policy_shape(directory)
    layout, tensors = mtp_layout(shape), read_head(head, shape)
    _, owners = tensor_files(directory)
    dtype = _dtype(directory, owners)
    pieces = {SHARD: {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}}
    others = {name: file for name, file in owners.items() if not name.startswith(layout.prefix)}
    for file in {owners[name] for name in owners.keys() - others.keys()} - {SHARD}:  # with an older head
        with TensorFile(directory / file, "pt") as reader:
            pieces[file] = {name: reader.get_tensor(name) for name in reader.names if name in others}
    config = read_json(directory / CONFIG)
    # verl sets the count to 0 (`model.mtp.enable=False`) before it saves a policy, and vLLM then divides by it.
    (config.get("text_config") or config)[layout.count] = 1
    index = {"metadata": {}, "weight_map": {**others, **dict.fromkeys(tensors, SHARD)}}
    contents = {file: save(held, metadata={"format": "pt"}) for file, held in pieces.items()}
    texts = {INDEX: index, CONFIG: config}
    contents |= {file: (json.dumps(fields, indent=1) + "\n").encode() for file, fields in texts.items()}
    for file, content in contents.items():
        with replacing(directory / file) as stream:
            stream.write(content)
    return directory / SHARD


def _dtype(directory: Path, owners: Mapping[str, str]) -> torch.dtype:
    """That of the policy's embedding."""
    name = next((name for name in owners if name.endswith("embed_tokens.weight")), None)
    if name is None:
        raise DrafterError(f"{directory} has no tensor that ends in 'embed_tokens.weight'.")
    with TensorFile(directory / owners[name], "pt") as reader:
        return reader.dtype(name)
