"""What a drafter needs to know of its policy, read from the policy's Hugging Face config.

What a config leaves out, or spells in an older way, is filled in by the family's class in transformers.

An aux layer id i means the residual stream *before* layer i, the layer's input: 0 is the embeddings. vLLM collects it
there (`EagleModelMixin._maybe_add_hidden_state`), ascending; `hidden_states[i]` of transformers is the same tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from verl_tlt.drafter.model_files import Model, first_line, folder
from verl_tlt.errors import DrafterError
from verl_tlt.files.disk import CONFIG
from verl_tlt.files.json_files import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "num_hidden_layers",
)  # fmt: skip
"""Sizes that every config says."""

SUPPORTED = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "glm", "phi3", "ernie4_5", "arcee", "apertus", "qwen2_5_vl",
    "qwen3_vl", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
)  # fmt: skip
"""Policies that vLLM serves with an EAGLE-3 head, each tested with a small model from captured states to tokens."""

_LATENT = "latent attention (MLA) does not start on vLLM's CPU backend, where each family is tested with a head"
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ADDS_ONE = ("qwen3_next", "qwen3_5")
"""Prefixes of model types whose RMSNorm multiplies by one more than its weight."""
UNTESTABLE = {
    "qwen3_vl_moe": "vLLM 0.28 does not read its experts as transformers 5 saves them, so no small model was tested",
}
"""Other policies that vLLM serves with a head, beside those with latent attention, and why none is supported here."""
WITHOUT_STATES = ("MiMoForCausalLM",)
"""Architectures whose class in vLLM hands out no hidden states, although it inherits from one that does."""

NUM_AUX = 3
"""Hidden states of the policy the drafter reads at each position (EAGLE-3 section 3: low, middle, high)."""
COMPUTED_ROPE = ("default", "linear", "llama3")
"""RoPE types whose table is computed position by position from constants: a longer one continues a shorter one."""
MTP = "mtp"
"""Value of `speculators_model_type`, and of `tlt.drafter.method`, of a policy's own head (`drafter.mtp`)."""
Fields = dict[str, Any]
"""A JSON object, such as a config."""
PolicyLike: TypeAlias = "PretrainedConfig | Mapping[str, Any] | PolicyShape | Model"
"""A `transformers` config, a mapping of its fields, a `PolicyShape`, the policy's directory or its name on the hub."""


@dataclass(frozen=True)
class PolicyShape:
    """The size of a policy, as its config says it."""

    source: str  # where the fields were read: a path, or the name of the config's class; for messages
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of an MLP; where every layer is a mixture of experts, of all the experts that one token passes through."""
    num_experts: int  # of a layer that is a mixture of experts; 0: there are none
    experts_per_token: int
    expert_width: int  # of one expert's MLP; 0 without experts
    shared_width: int  # of the expert that every token passes through; 0 without one
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Fields  # as transformers 5 spells it: `rope_type`, `rope_theta` and what the type needs
    tied: bool  # the policy's head is its embedding
    latent: bool  # its attention is latent (MLA)
    nested: bool  # the language model is a part of a larger one, with a config inside its config

    @property
    def norm_offset(self) -> float:
        """What the final RMSNorm adds to its weight before it multiplies by it."""
        return 1.0 if self.model_type.startswith(_ADDS_ONE) else 0.0


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what transformers logs of a config, which is read many times."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def policy_shape(policy: PolicyLike) -> PolicyShape:
    """The shape of `policy`, in any form of `PolicyLike`; a `DrafterError` where its config lacks a field."""
    if isinstance(policy, PolicyShape):
        return policy
    if isinstance(policy, str | os.PathLike):
        return _from_fields(read_model_config(policy), str(Path(policy) / CONFIG))
    if isinstance(policy, Mapping):
        return _from_fields(dict(policy), "the policy's config")
    if not hasattr(policy, "to_dict"):
        wanted = "a folder, a name on the hub, a transformers config or a mapping of its fields"
        raise DrafterError(f"A policy's shape is read from {wanted}, not from a {type(policy).__name__}.")
    return _from_fields(policy.to_dict(), type(policy).__name__)


def read_model_config(model: Model, *, fetch: bool = True) -> Fields:
    """The fields of a model's `config.json`, as they are; from the hub, if `fetch`, where the local cache has none."""
    file = folder(model, (CONFIG,), fetch=fetch) / CONFIG
    fields = read_json(file)
    inner = fields.get("text_config") or {}
    if not isinstance(inner, dict):
        raise DrafterError(f"{file}: text_config must be an object, not {str(inner)[:80]}.")
    for part in (fields, inner):
        for key in ("architectures", "layer_types"):
            names = part.get(key) or []
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise DrafterError(f"{file}: {key} must be a list of names, not {str(names)[:80]}.")
    return fields


_QUANTIZED = ("quantization_config", "compression_config")
"""Fields of a config by which vLLM takes weights for quantized: transformers', and compressed-tensors' former one."""
_QUANTIZED_BY_MODELOPT = "hf_quant_config.json"


def check_unquantized(model: Model) -> None:
    """Raise a `DrafterError` where a policy's weights are quantized."""
    fields = read_model_config(model)
    text = fields.get("text_config") or {}
    config = Path(model) / CONFIG
    found = [(config, key, place[key]) for key in _QUANTIZED for place in (fields, text) if place.get(key)]
    separate = Path(model) / _QUANTIZED_BY_MODELOPT
    if separate.is_file():
        quantization = read_json(separate).get("quantization")
        if quantization:
            found.append((separate, "quantization", quantization))
    if not found:
        return
    file, key, given = found[0]
    method = None
    if isinstance(given, dict):
        method = given.get("quant_method") or given.get("quant_algo")
    raise DrafterError(
        f"{file}: {key} ({method or 'no method named'}): drafters beside a quantized policy "
        "were not tested; use the policy in 16 bits."
    )


def has_latent_attention(fields: Fields) -> bool:
    """Whether a policy's attention is latent (MLA), by the fields of its config."""
    return (fields.get("text_config") or fields).get("kv_lora_rank") is not None


def unsupported(model_type: str, architectures: Sequence[str], latent: bool) -> str | None:
    """Why there are no EAGLE-3 heads for such policies, as the end of a sentence; None: there are."""
    for name in architectures:
        if name in WITHOUT_STATES:
            own = "its own MTP head drafts with tlt.drafter.method=mtp"
            return f"vLLM hands the hidden states of {name} to no EAGLE-3 head; {own}"
    if model_type in SUPPORTED:
        return None
    supported = f"drafters exist for {', '.join(SUPPORTED)}"
    why = _LATENT if latent else UNTESTABLE.get(model_type)
    return f"{why}; {supported}" if why else supported


def _from_fields(whole: Fields, source: str) -> PolicyShape:
    try:
        whole = _completed(whole, source)
        nested = whole.get("text_config")
        fields = nested or whole
        heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
        kv_heads = int(fields.get("num_key_value_heads") or heads)
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
        return PolicyShape(
            source=source,
            model_type=str(whole["model_type"]),
            architectures=tuple(whole.get("architectures") or ()),
            hidden_size=hidden,
            vocab_size=int(fields["vocab_size"]),
            num_layers=int(fields["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=int(fields.get("head_dim") or hidden // heads),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(fields["max_position_embeddings"]),
            rope=rope_of(fields),
            tied=bool(whole.get("tie_word_embeddings", fields.get("tie_word_embeddings", False))),
            latent=has_latent_attention(whole),
            nested=bool(nested),
            **_mlp(fields),
        )
    except KeyError as error:
        raise DrafterError(f"{source} has no field {error.args[0]!r}, which a drafter's shape depends on.") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, DrafterError):
            raise
        raise DrafterError(f"{source} has a field of a kind that no model's has: {error}.") from error


def _completed(whole: Fields, source: str) -> Fields:
    """The config completed by the family's class in transformers; unchanged where there is no such class.

    A language model's own config must say its sizes, since the class would fill in those of another model.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(whole["model_type"])
    if model_type not in SUPPORTED or model_type not in CONFIG_MAPPING:
        return whole
    nested = any(isinstance(whole.get(key), dict) for key in ("text_config", "vision_config"))
    if not nested:
        for key in _SIZES:
            if key not in whole and f"moe_{key}" not in whole:
                raise KeyError(key)
    try:
        with quiet():
            return dict(CONFIG_MAPPING[model_type](**deepcopy(whole)).to_dict())  # it changes what is inside
    except Exception as error:  # whatever a class of transformers raises for what it was not made for
        raise DrafterError(f"{source} is no config of a {model_type} model: {first_line(error)}.") from error


def _mlp(fields: Fields) -> dict[str, int]:
    experts = next((int(fields[key]) for key in _NUM_EXPERTS if fields.get(key)), 0)
    per_token = int(fields.get("num_experts_per_tok") or 1)
    width, expert_width = (int(fields.get(key) or 0) for key in ("intermediate_size", "moe_intermediate_size"))
    if not width and not expert_width:
        raise KeyError("intermediate_size")
    shared = int(fields.get("shared_expert_intermediate_size") or 0)
    if experts and not 1 <= per_token <= experts:
        raise ValueError(f"num_experts_per_tok={per_token} of {experts} experts")
    return {
        "intermediate_size": width or expert_width * per_token + shared,
        "num_experts": experts,
        "experts_per_token": per_token if experts else 0,
        "expert_width": (expert_width or width) if experts else 0,
        "shared_width": shared,
    }


def rope_of(fields: Fields) -> Fields:
    """RoPE settings as transformers 5 keeps them, from older spellings too; where layers differ, full attention's."""
    rope = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    rope = dict(rope.get("full_attention") or rope)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    return {"rope_type": kind, "rope_theta": float(fields.get("rope_theta") or 10000.0), **rope}


def drafter_rope(rope: Fields) -> Fields:
    """RoPE for a drafter of a policy with `rope`: all of each head is rotated, by one position.

    An image patch's three positions are equal for text. Factors for a part of a head (Phi-4-mini) fit no whole one.
    """
    left_out = ("type", "partial_rotary_factor")
    if rope["rope_type"] == "mrope" or ("long_factor" in rope and rope.get("partial_rotary_factor", 1) != 1):
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    rope = {key: value for key, value in rope.items() if key not in left_out and "mrope" not in key}
    return _with_scale(rope) if rope["rope_type"] == "yarn" and rope.get("factor") else rope


def _with_scale(rope: Fields) -> Fields:
    """YaRN's settings with the attention's scale as transformers computes it.

    Releases of vLLM read it under two names: `attention_factor` is the scale, and `attn_factor` its ratio to the scale
    that is usual for this `factor`.
    """

    def usual(mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    scale = rope.get("attention_factor")
    mscale = rope.get("mscale")
    mscale_all_dim = rope.get("mscale_all_dim")
    if scale is None:
        scale = usual(mscale) / usual(mscale_all_dim) if mscale and mscale_all_dim else usual()
    others = ("mscale", "mscale_all_dim", "apply_yarn_scaling")
    kept = {key: value for key, value in rope.items() if key not in others}
    return {**kept, "attention_factor": scale, "attn_factor": scale / usual()}


def aux_layers_for(num_layers: int) -> tuple[int, int, int]:
    """The default aux layers of a policy of three layers or more: vLLM's own where those are distinct."""
    if num_layers < NUM_AUX:
        raise DrafterError(f"The policy has {num_layers} layers; a drafter needs at least {NUM_AUX} to read from.")
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return (0, 1, 2) if num_layers == 3 else (1, num_layers // 2, num_layers - 1)


WHOLE_UP_TO = 65_536
"""Largest vocabulary of a policy of which a new drafter drafts all tokens by default."""
PRUNED_TO = 32_768
"""Tokens that a new drafter drafts of a larger vocabulary. A drafted token reads the weights of the drafter's layer and
head. Pruning a head of 64k rows would save fewer weights than the layer has; pruning one of 128k rows saves more."""


def draft_vocab_size(asked: int | str | None, vocabulary: int, where: str) -> int:
    """Tokens that a new drafter can draft; `asked`: a number up to `vocabulary`, "full", or None: the default."""
    if asked is None:
        return vocabulary if vocabulary <= WHOLE_UP_TO else PRUNED_TO
    if asked == "full":
        return vocabulary
    if not 2 <= int(asked) <= vocabulary:
        raise DrafterError(f"{where} must be 2..{vocabulary}, the policy's vocabulary, not {asked}.")
    return int(asked)


def check_aux_layers(layers: Sequence[int], num_layers: int, where: str) -> None:
    """Raise a `DrafterError`, which begins with `where`, unless these are three ascending layers of the policy."""
    if len(layers) != NUM_AUX or list(layers) != sorted(set(layers)):
        raise DrafterError(f"{where} must be {NUM_AUX} ascending distinct layers, not {list(layers)}.")
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise DrafterError(f"{where}={list(layers)} is outside 0..{num_layers - 1}, the layers of the policy.")
