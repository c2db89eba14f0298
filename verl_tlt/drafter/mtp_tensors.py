"""A policy's own head for multi-token prediction (MTP) on disk: what it is called, and its tensors.

A release has the head among the policy's tensors; transformers drops it when it loads and saves the policy, so a
trained policy has lost it. Names are those by which vLLM's `qwen3_5_mtp.py` and `mimo_mtp.py` load a head. Only reading
a head needs torch.

Of a head with experts, Qwen3.5's releases hold each expert by itself, Qwen3.6's all in one tensor, as do transformers'
decoder layer and whatever is saved and published here. vLLM reads both (`routed_experts.py`, `load_weights`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verl_tlt.drafter.model_files import Model
from verl_tlt.drafter.policy import PolicyShape, policy_shape, read_model_config
from verl_tlt.drafter.tensor_file import FLOATS, Header, check_finite, headers, read_parts, tensor_files
from verl_tlt.errors import DrafterError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MTPLayout:
    """How policies of one family hold their MTP head."""

    prefix: str  # beginning of its tensors' names
    count: str  # the field of the policy's config that says how many MTP layers there are
    block: str  # beginning of its decoder layer's names
    projection: str
    norms: tuple[str, str, str]  # of the embedding, of the hidden state, and the final one
    gated: bool
    """Attention as in Qwen3.5: queries come with gates, and queries and keys are normed; else as in Qwen2: biased."""
    experts: bool = False
    """Whether its layer is a mixture of experts, with one more expert that every token passes through."""


QWEN3_5 = MTPLayout(
    "mtp.", "mtp_num_hidden_layers", "mtp.layers.0.", "mtp.fc",
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), gated=True,
)  # fmt: skip
_MIMO = "model.mtp_layers.0."
MIMO = MTPLayout(
    "model.mtp_layers.", "num_nextn_predict_layers", _MIMO, f"{_MIMO}input_proj",
    (f"{_MIMO}token_layernorm", f"{_MIMO}hidden_layernorm", f"{_MIMO}final_layernorm"), gated=False,
)  # fmt: skip
QWEN3_5_MOE = replace(QWEN3_5, experts=True)
LAYOUTS = {
    "MiMoForCausalLM": MIMO,
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), QWEN3_5),
    **dict.fromkeys(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), QWEN3_5_MOE),
}
"""By architecture: policies whose head drafts and is trained, each tested with a small model."""
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors that hold all experts, and the projections concatenated in them for each expert."""


def mtp_layout(shape: PolicyShape) -> MTPLayout:
    """How this policy holds its MTP head; a `DrafterError` where it has none that drafts here."""
    architecture = shape.architectures[0] if shape.architectures else None
    layout = LAYOUTS.get(str(architecture))
    if layout is None:
        raise DrafterError(
            f"{shape.source} names {architecture}, and method=mtp drafts for {', '.join(LAYOUTS)} alone."
        )
    if layout.experts and not all((shape.num_experts, shape.expert_width, shape.shared_width)):
        raise DrafterError(
            f"{shape.source} names {architecture}, whose num_experts, moe_intermediate_size and "
            "shared_expert_intermediate_size must be above 0."
        )
    return layout


def head_shapes(shape: PolicyShape, single: bool = False) -> dict[str, list[int]]:
    """The shape of each tensor of the head, by its name in the policy's checkpoint; `single`: experts one by one."""
    layout = mtp_layout(shape)
    hidden = shape.hidden_size
    inner = shape.intermediate_size
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    attention = f"{layout.block}self_attn."
    mlp = f"{layout.block}mlp."
    experts: dict[str, list[int]] = {}
    if layout.experts:
        experts = _experts_shapes(mlp, shape, single)
        mlp = f"{mlp}shared_expert."
        inner = shape.shared_width
    shapes = {
        f"{layout.projection}.weight": [hidden, 2 * hidden],
        **{f"{norm}.weight": [hidden] for norm in layout.norms},
        f"{layout.block}input_layernorm.weight": [hidden],
        f"{layout.block}post_attention_layernorm.weight": [hidden],
        f"{attention}q_proj.weight": [2 * queries if layout.gated else queries, hidden],
        f"{attention}k_proj.weight": [keys, hidden],
        f"{attention}v_proj.weight": [keys, hidden],
        f"{attention}o_proj.weight": [hidden, queries],
        f"{mlp}gate_proj.weight": [inner, hidden],
        f"{mlp}up_proj.weight": [inner, hidden],
        f"{mlp}down_proj.weight": [hidden, inner],
        **experts,
    }
    if layout.gated:
        return shapes | {
            f"{attention}q_norm.weight": [shape.head_dim],
            f"{attention}k_norm.weight": [shape.head_dim],
        }
    return shapes | {
        f"{attention}q_proj.bias": [queries],
        f"{attention}k_proj.bias": [keys],
        f"{attention}v_proj.bias": [keys],
    }


def _experts_shapes(mlp: str, shape: PolicyShape, single: bool) -> dict[str, list[int]]:
    """Shapes of the routed experts and of the gates, by names that begin with `mlp`."""
    count, hidden, width = shape.num_experts, shape.hidden_size, shape.expert_width
    shapes = {f"{mlp}gate.weight": [count, hidden], f"{mlp}shared_expert_gate.weight": [1, hidden]}
    if not single:
        fused = {"gate_up_proj": [count, 2 * width, hidden], "down_proj": [count, hidden, width]}
        return shapes | {f"{mlp}experts.{name}": size for name, size in fused.items()}
    for i in range(count):
        expert = f"{mlp}experts.{i}."
        shapes |= {f"{expert}gate_proj.weight": [width, hidden], f"{expert}up_proj.weight": [width, hidden]}
        shapes[f"{expert}down_proj.weight"] = [hidden, width]
    return shapes


def mtp_tensors(policy: Model, fetch: bool = True) -> dict[str, Header]:
    """Headers of a policy's MTP head, from files fetched from the hub if `fetch`; a `DrafterError` if it has none."""
    config = read_model_config(policy, fetch=fetch)
    shape = policy_shape(policy)
    layout = mtp_layout(shape)
    text_config = config.get("text_config") or config
    layers = text_config.get(layout.count) or 0
    if layers != 1:
        raise DrafterError(f"{shape.source} says {layout.count}={layers}, and an MTP head that drafts has one layer.")
    return head_files(policy, shape, fetch)


def head_files(source: Model, shape: PolicyShape, fetch: bool = True) -> dict[str, Header]:
    """Headers of the MTP head's tensors in `source`: the policy, or a folder that a head was saved in.

    A `DrafterError` unless every tensor is there with its shape, and no other of its kind.
    """
    layout = mtp_layout(shape)
    listing, owners = tensor_files(source, fetch)
    files = {name: file for name, file in owners.items() if name.startswith(layout.prefix)}
    if not files:
        raise DrafterError(
            f"{listing} holds no MTP head ({layout.prefix}*), as after save_pretrained of transformers: put one back "
            "with verl-tlt write-back HEAD POLICY, or set tlt.drafter.method=eagle3."
        )
    single = layout.experts and any(".mlp.experts." in name and name.endswith("_proj.weight") for name in files)
    shapes = head_shapes(shape, single)
    different = sorted(files.keys() ^ shapes.keys())
    if different:
        verb = "holds" if different[0] in files else "lacks"
        raise DrafterError(
            f"{listing} {verb} {different[0]}: that is no head of one layer such as its config asks for."
        )
    tensors = headers(source, listing, files, fetch)
    for name, header in tensors.items():
        header.must_be(shapes[name], "the policy's config", FLOATS)
    return tensors


def read_head(source: Model, shape: PolicyShape) -> dict[str, torch.Tensor]:
    """The tensors of `head_files` on the host, all experts in one; a `DrafterError` too for NaN or infinity."""
    tensors = read_parts(head_files(source, shape))
    check_finite(tensors, source)
    for name in head_shapes(shape):
        if name not in tensors:
            tensors[name] = _fuse_experts(name, tensors, shape.num_experts)
    return tensors


def _fuse_experts(name: str, tensors: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """The tensor `name` of all experts, made of each expert's own, which are removed from `tensors`."""
    import torch

    experts, _, fused = name.rpartition(".")
    per_expert = []
    for i in range(count):
        parts = [tensors.pop(f"{experts}.{i}.{part}.weight") for part in _FUSED[fused]]
        per_expert.append(torch.cat(parts))
    return torch.stack(per_expert)
