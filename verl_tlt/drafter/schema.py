"""What an EAGLE-3 drafter's `config.json` may say: every field that vLLM or speculators reads, with its bounds.

Other fields are dropped: what is staged for vLLM is made of these alone, so a file from elsewhere cannot name code,
another model, a quantization or a dtype. A value that means another network than the one served layer is refused.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_tlt.drafter.policy import LONGEST_DRAFT, DrafterError, Fields, PolicyShape, drafter_rope, rope_of
from verl_tlt.errors import wrong_field

Size = Annotated[int, Field(ge=1, le=1 << 31)]
Scale = Annotated[float, Field(gt=0, le=1e12)]
_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""RoPE types, and what vLLM computes each from besides `rope_theta` (`rotary_embedding/__init__.py`, `get_rope`)."""
_LAYER_NORMS = ("fc_norm", "norm_output")
"""Switches that vLLM 0.24 reads in the layer's config alone (`speculators/algos.py`, `update_eagle3`)."""
_STRETCHED = ("linear", "dynamic", "yarn")
"""RoPE types whose table vLLM makes `factor` times as long."""
_MOST_STRETCH = 4
"""Most rows of a RoPE table for each position that the engine needs."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class Rope(_Part):
    """`rope_parameters`: the whole head is rotated, by one position."""

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
    rope_theta: Scale
    factor: Annotated[float, Field(ge=1, le=1e6)] | None = None
    original_max_position_embeddings: Size | None = None
    attention_factor: Scale | None = None
    beta_fast: Scale | None = None
    beta_slow: Scale | None = None
    mscale: Scale | None = None
    mscale_all_dim: Scale | None = None
    low_freq_factor: Scale | None = None
    high_freq_factor: Scale | None = None
    truncate: bool | None = None
    short_factor: Annotated[list[Scale], Field(max_length=4096)] | None = None
    long_factor: Annotated[list[Scale], Field(max_length=4096)] | None = None
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] | None = None


class Layer(_Part):
    """`transformer_layer_config`: one layer of the Llama architecture, in full attention."""

    model_type: Literal["llama"] = "llama"
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Literal[1]
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Annotated[int, Field(ge=2, le=4096, multiple_of=2)]
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Annotated[float, Field(gt=0, le=0.1)] = 1e-6
    max_position_embeddings: Annotated[int, Field(ge=1)]
    rope_parameters: Rope
    attention_bias: bool = False
    mlp_bias: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = Field(None, exclude=True)
    quantization_config: None = None


class Drafter(_Part):
    """The whole `config.json`, in speculators' form."""

    speculators_model_type: Literal["eagle3"]
    transformer_layer_config: Layer
    draft_vocab_size: Size
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_hidden_size: Size | None = None
    eagle_aux_hidden_state_layer_ids: list[int]
    own_head: bool | None = None
    quantization_config: None = None


def checked(config: Fields, where: str, layer_at: str) -> Drafter:
    """The drafter's config, compared with nothing but itself; a `DrafterError` names the first field that is wrong.

    `where`: the file. `layer_at`: its prefix for the fields of the layer, empty or with a dot at its end.
    """
    layer = config.get("transformer_layer_config")
    if isinstance(layer, dict):
        config = {**config, "transformer_layer_config": {**layer, "rope_parameters": _rope(layer)}}
    try:
        drafter = Drafter.model_validate(config)
    except ValidationError as error:
        key, wrong = wrong_field(error)
        raise DrafterError(f"{where}: {key.replace('transformer_layer_config.', layer_at)} {wrong}") from None
    if drafter.norm_before_fc and drafter.fc_norm:
        raise DrafterError(f"{where}: norm_before_fc and fc_norm are both true, and a drafter has one of them.")
    _check_rope(drafter.transformer_layer_config, f"{where}: {layer_at}")
    return drafter


def _rope(layer: Fields) -> object:
    try:
        return rope_of(layer)
    except (TypeError, ValueError):
        given = layer.get("rope_parameters") or layer.get("rope_scaling")
        return given or {"rope_type": "default", "rope_theta": layer.get("rope_theta")}


def _check_rope(layer: Layer, prefix: str) -> None:
    rope = layer.rope_parameters
    if missing := next((key for key in _NEEDS[rope.rope_type] if getattr(rope, key) is None), None):
        raise DrafterError(f"{prefix}rope_parameters of type {rope.rope_type!r} need {missing}.")
    for key in ("short_factor", "long_factor"):
        factors = getattr(rope, key)
        if factors is not None and len(factors) != layer.head_dim // 2:
            raise DrafterError(f"{prefix}rope_parameters.{key} must have {layer.head_dim // 2} numbers.")


def check_rows(layer: Layer, policy: PolicyShape, positions: int, prefix: str) -> None:
    """Raise a `DrafterError` where vLLM's RoPE table would be much longer than the `positions` that an engine needs."""
    rope = layer.rope_parameters
    if rope.model_dump(exclude_none=True) == drafter_rope(policy.rope):  # as long as the policy's own
        return
    factor = rope.factor if rope.rope_type in _STRETCHED and rope.factor else 1.0
    rows = factor * max(layer.max_position_embeddings, rope.original_max_position_embeddings or 0)
    if rows > _MOST_STRETCH * positions:
        raise DrafterError(
            f"{prefix}rope_parameters and max_position_embeddings ask for a table of {rows:.0f} positions, and the "
            f"policy needs {positions}."
        )


def as_served(drafter: Drafter, policy: PolicyShape) -> Fields:
    """The `config.json` that is staged: the fields of this schema, and what speculators asks for besides."""
    fields = drafter.model_dump(exclude_none=True)
    fields["transformer_layer_config"] |= {"tie_word_embeddings": False, "mlp_bias": False}
    fields["transformer_layer_config"] |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    fields["transformer_layer_config"] |= {norm: True for norm in _LAYER_NORMS if fields[norm]}
    return fields | {"architectures": ["Eagle3Speculator"], "speculators_config": library_fields("eagle3", policy)}


def layer_fields(policy: PolicyShape) -> Fields:
    """What the config of a new drafter's one layer takes from its policy."""
    return {
        "vocab_size": policy.vocab_size,
        "hidden_size": policy.hidden_size,
        "intermediate_size": policy.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": policy.num_heads,
        "num_key_value_heads": policy.num_kv_heads,
        "head_dim": policy.head_dim,
        "rms_norm_eps": policy.rms_norm_eps,
        "max_position_embeddings": policy.max_position_embeddings + LONGEST_DRAFT,
        "tie_word_embeddings": False,
    }


def library_fields(algorithm: str, policy: PolicyShape) -> Fields:
    """What speculators asks for besides a drafter's network."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        # For `vllm serve DRAFTER`; `--speculative-config` overrides it.
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        # Without a path the library reads no policy weights of its own: `refresh_verifier_weights` supplies them.
        "verifier": {"name_or_path": None, "architectures": list(policy.architectures)},
    }
