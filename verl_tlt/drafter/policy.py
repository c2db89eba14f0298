"""What a drafter needs to know of the policy it drafts for: its shape, and the layers it reads; and how to say no.

The doctor asks on the driver, where neither torch nor transformers should be imported for it, so a directory is
read as JSON; inside a worker the `transformers` config object at hand says the same.

An aux layer id i means the residual stream *before* layer i, the layer's input: 0 is the embeddings. vLLM collects it
there (`EagleModelMixin._maybe_add_hidden_state`), ascending; `hidden_states[i]` of transformers is the same tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tlt.drafter.hub import folder
from verl_tlt.errors import DrafterError as DrafterError

SUPPORTED = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "glm", "phi3", "ernie4_5", "arcee", "apertus", "qwen2_5_vl",
    "qwen3_vl",
)  # fmt: skip
"""Policies whose hidden states vLLM hands to an EAGLE-3 head, each tested with a small model from tap to tokens."""

_LATENT = "latent attention (MLA) does not start on vLLM's CPU backend, where each family is tested with a head"
_RECURRENT = "with linear attention an engine of vLLM 0.28 fails when the draft length changes (on its CPU backend)"
_EXPERTS = "vLLM 0.28 does not read its experts as transformers 5 saves them, so no small model could be tested"
UNTESTABLE = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "kimi_vl"), _LATENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _RECURRENT),
    "qwen3_vl_moe": _EXPERTS,
}
"""Policies beside which vLLM would serve a head, and what stands in the way all the same."""

NUM_AUX = 3
"""Hidden states of the policy the drafter sees at each position (EAGLE-3 section 3: low, middle, high)."""

LONGEST_DRAFT = 16
"""Positions a drafter needs beyond the policy's own range: the longest draft there is."""

COMPUTED_ROPE = ("default", "linear", "llama3")
"""RoPE types whose table is computed position by position from constants: a longer one continues a shorter one."""

PolicyLike = Any
"""A `transformers` config, a mapping of its fields, a `PolicyShape`, the policy's directory or its name on the hub."""


@dataclass(frozen=True)
class PolicyShape:
    """The fields of a policy's config that decide the shape of its drafter."""

    source: str
    """Where the fields were read: a path for messages, or the name of the config class."""
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any]
    """RoPE as transformers 5 spells it: `rope_type`, `rope_theta` and what the type needs."""
    tied: bool
    """Whether the policy's head is its embedding."""
    nested: bool
    """Whether the language model is a part of a larger one, with a config inside its config."""


def policy_shape(policy: PolicyLike) -> PolicyShape:
    """The shape of `policy`, whichever way it is given.

    Raises:
        DrafterError: the directory has no readable `config.json`, or a field is missing.
    """
    if isinstance(policy, PolicyShape):
        return policy
    if isinstance(policy, str | os.PathLike):
        return read_policy_config(policy)
    if isinstance(policy, Mapping):
        return _from_fields(policy, "the policy's config")
    return _from_fields(policy.to_dict(), type(policy).__name__)


def read_policy_config(directory: str | os.PathLike) -> PolicyShape:
    """The shape of the policy in a Hugging Face directory, or of that name on the hub.

    Raises:
        DrafterError: `config.json` is missing, unreadable or lacks a field.
    """
    path = folder(directory, ("config.json",)) / "config.json"
    return _from_fields(read_json(path), str(path))


def unsupported(model_type: str) -> str | None:
    """The end of a sentence that says why there are no drafters for policies of this type; None: there are."""
    if model_type in SUPPORTED:
        return None
    why = UNTESTABLE.get(model_type)
    return f"drafters exist for {', '.join(SUPPORTED)}{f': {why}' if why else ''}"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or a `DrafterError` that says what is wrong with the file."""
    if not path.is_file():
        raise DrafterError(f"{path} does not exist.")
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DrafterError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(value, dict):
        raise DrafterError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _from_fields(whole: Mapping[str, Any], source: str) -> PolicyShape:
    nested = whole.get("text_config")
    fields = nested or whole
    try:
        heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
        return PolicyShape(
            source=source,
            model_type=str(whole["model_type"]),
            architectures=tuple(whole.get("architectures") or ()),
            hidden_size=hidden,
            vocab_size=int(fields["vocab_size"]),
            num_layers=int(fields["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or hidden // heads),
            intermediate_size=int(fields.get("intermediate_size") or _active_width(fields)),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(fields["max_position_embeddings"]),
            rope=rope_of(fields),
            tied=bool(whole.get("tie_word_embeddings", fields.get("tie_word_embeddings", False))),
            nested=bool(nested),
        )
    except KeyError as error:
        raise DrafterError(f"{source} has no field {error.args[0]!r}, which a drafter's shape depends on.") from error


def _active_width(fields: Mapping[str, Any]) -> int:
    """The MLP's width that a token passes through in a mixture of experts without a dense layer."""
    if "moe_intermediate_size" not in fields:
        raise KeyError("intermediate_size")
    routed = int(fields["moe_intermediate_size"]) * int(fields["num_experts_per_tok"])
    return routed + int(fields.get("shared_expert_intermediate_size") or 0)


def rope_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings in the one-dict form; files older than transformers 5 keep `rope_theta` and `rope_scaling`.

    Those of full attention where layers differ.
    """
    if fields.get("rope_parameters"):
        rope = dict(fields["rope_parameters"])
        return dict(rope.get("full_attention") or rope)
    scaling = dict(fields.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    return {"rope_type": kind, "rope_theta": float(fields.get("rope_theta", 10000.0)), **scaling}


def drafter_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE for a drafter of a policy with `rope`: all of each head is rotated, by one position.

    A policy may rotate a part of each head, or rotate by the three positions of an image's patch, which are one and
    the same for text. The drafter has a KV cache of its own and learns with its own RoPE.
    """
    own = {key: value for key, value in rope.items() if key != "partial_rotary_factor" and "mrope" not in key}
    return {**own, "rope_type": "default"} if rope["rope_type"] == "mrope" else own


def aux_layers_for(num_layers: int) -> tuple[int, int, int]:
    """The default aux layers of a policy with `num_layers` layers.

    vLLM's own default where its three ids are distinct; shallower policies get them spread out, because vLLM keeps ids
    in a set and equal ones would collapse.

    Raises:
        DrafterError: fewer than three layers.
    """
    if num_layers < NUM_AUX:
        raise DrafterError(f"The policy has {num_layers} layers; a drafter needs at least {NUM_AUX} to read from.")
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return (0, 1, 2) if num_layers == 3 else (1, num_layers // 2, num_layers - 1)


def check_aux_layers(layers: Sequence[int], num_layers: int, where: str) -> None:
    """Return when vLLM would hand over these layers, in this order.

    Raises:
        DrafterError: another number than three, an order that is not ascending, or layers the policy does not have;
            the message begins with `where`.
    """
    if len(layers) != NUM_AUX or list(layers) != sorted(set(layers)):
        raise DrafterError(f"{where} must be {NUM_AUX} ascending distinct layers, not {list(layers)}.")
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise DrafterError(f"{where}={list(layers)} is outside 0..{num_layers - 1}, the layers of the policy.")
