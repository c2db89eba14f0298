"""A policy's own head for multi-token prediction (MTP) on disk: what it is called, and its tensors.

A release has it among the policy's tensors; transformers leaves it out when it loads and saves the policy, so a trained
policy has lost it. Names are those by which vLLM's `qwen3_5_mtp.py` and `mimo_mtp.py` load it. Needs no torch.
"""

from dataclasses import dataclass

from verl_tlt.drafter.policy import (
    DrafterError,
    Model,
    PolicyShape,
    headers,
    policy_shape,
    read_model_config,
    tensor_files,
)
from verl_tlt.drafter.tensor_file import FLOATS, Header


@dataclass(frozen=True)
class MTPLayout:
    """How policies of one family hold their head."""

    prefix: str  # beginning of its tensors' names
    count: str  # the field of the policy's config that says how many MTP layers there are
    block: str  # beginning of its decoder layer's names
    projection: str
    norms: tuple[str, str, str]  # of the embedding, of the hidden state, and the final one
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
    others = f"; {why}" if shape.num_experts else ""
    raise DrafterError(
        f"{shape.source} names {architecture}, and method=mtp drafts for {', '.join(LAYOUTS)} alone{others}."
    )


def head_shapes(shape: PolicyShape) -> dict[str, list[int]]:
    """The shape of each tensor of the head, by its name in the policy's checkpoint."""
    layout, hidden, inner = mtp_layout(shape), shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    wanted = {
        f"{layout.projection}.weight": [hidden, 2 * hidden],
        **{f"{norm}.weight": [hidden] for norm in layout.norms},
        **layer_shapes(layout.block, hidden, inner, queries, keys, reads=hidden),
    }
    attention = f"{layout.block}self_attn."
    if layout.gated:
        wanted[f"{attention}q_proj.weight"] = [2 * queries, hidden]
        return wanted | {f"{attention}{norm}.weight": [shape.head_dim] for norm in ("q_norm", "k_norm")}
    return wanted | {f"{attention}{x}_proj.bias": [n] for x, n in (("q", queries), ("k", keys), ("v", keys))}


def layer_shapes(block: str, hidden: int, inner: int, queries: int, keys: int, reads: int) -> dict[str, list[int]]:
    """Shapes of a decoder layer's weights, by names that begin with `block`; its attention `reads` so many numbers."""
    attention, mlp = f"{block}self_attn.", f"{block}mlp."
    return {
        f"{block}input_layernorm.weight": [hidden],
        f"{block}post_attention_layernorm.weight": [hidden],
        f"{attention}q_proj.weight": [queries, reads],
        f"{attention}k_proj.weight": [keys, reads],
        f"{attention}v_proj.weight": [keys, reads],
        f"{attention}o_proj.weight": [hidden, queries],
        f"{mlp}gate_proj.weight": [inner, hidden],
        f"{mlp}up_proj.weight": [inner, hidden],
        f"{mlp}down_proj.weight": [hidden, inner],
    }


def mtp_tensors(policy: Model, fetch: bool = True) -> dict[str, Header]:
    """Where each tensor of the head is among a policy's own, fetched from the hub if `fetch`; else a `DrafterError`."""
    config, shape = read_model_config(policy, fetch=fetch), policy_shape(policy)
    layout = mtp_layout(shape)
    if (layers := (config.get("text_config") or config).get(layout.count) or 0) != 1:
        raise DrafterError(f"{shape.source} says {layout.count}={layers}, and an MTP head that drafts has one layer.")
    return head_files(policy, shape, fetch)


def head_files(source: Model, shape: PolicyShape, fetch: bool = True) -> dict[str, Header]:
    """Where each tensor of the head is in `source`: the policy, or a folder that a head was saved in.

    A `DrafterError` unless every one is there with its shape, and no other of its kind.
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
    found = headers(source, listing, held, fetch)
    for name, header in found.items():
        header.must_be(wanted[name], "the policy's config", FLOATS)
    return found
