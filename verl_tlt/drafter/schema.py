"""What an EAGLE-3 drafter's `config.json` may say: every field that vLLM or speculators reads, with its bounds.

Other fields are dropped: what is staged for vLLM is made of these alone, so a file from elsewhere cannot name code,
another model, a quantization or a dtype. A value that means another network than the one served layer is refused.

Configs of SpecForge, SafeAILab/EAGLE and ModelOpt are translated. A drafter of theirs differs in two things: its head
is trained and stays (`own_head`), and the residual is taken before `hidden_norm`; `speculators.convert` knows of
neither. Sources: SafeAILab/EAGLE `eagle/model/cnets.py`; SpecForge `specforge/modeling/draft/llama3_eagle.py` and
`configs/`; ModelOpt `export/plugins/hf_spec_export.py`; SGLang `set_eagle3_layers_to_capture`; vLLM `llama_eagle3.py`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_tlt.drafter.policy import (
    COMPUTED_ROPE,
    CONFIG,
    LONGEST_DRAFT,
    Fields,
    PolicyShape,
    aux_layers_for,
    check_aux_layers,
    drafter_rope,
    read_json,
    rope_of,
)
from verl_tlt.errors import DrafterError, wrong_field

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
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
"""Of drafters in other layouts."""
_LAYER, _IDS = "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"


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


def read_config(path: Path, policy: PolicyShape, min_context: int = 0) -> Fields:
    """`CheckedDrafter.config` of the EAGLE-3 drafter in `path`; a `DrafterError` where it does not fit `policy`."""
    file, layer_at = path / CONFIG, f"{_LAYER}."
    config = read_json(file)
    if is_other_layout(config):
        config, layer_at = _to_speculators(config, policy, file), ""
    elif not config.get(_IDS):  # as before speculators 0.5: vLLM takes its default layers
        config = {**config, _IDS: list(aux_layers_for(policy.num_layers))}
    drafter, prefix = _checked(config, file, layer_at), f"{file}: {layer_at}"
    layer = drafter.transformer_layer_config
    for field, value, expected in (
        ("hidden_size", layer.hidden_size, policy.hidden_size),
        ("vocab_size", layer.vocab_size, policy.vocab_size),
        ("target_hidden_size", drafter.target_hidden_size or policy.hidden_size, policy.hidden_size),
    ):
        if value != expected:
            raise DrafterError(f"{prefix}{field}={value}, but the policy's is {expected} ({policy.source}).")
    heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads
    if heads % kv_heads:
        raise DrafterError(f"{prefix}num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}.")
    check_aux_layers(drafter.eagle_aux_hidden_state_layer_ids, policy.num_layers, f"{file}: {_IDS}")
    if drafter.draft_vocab_size > policy.vocab_size:
        raise DrafterError(f"{file}: draft_vocab_size must be 1..{policy.vocab_size}, not {drafter.draft_vocab_size}.")
    served = drafter.model_dump(exclude_none=True)
    served[_LAYER] |= {"tie_word_embeddings": False, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))}
    served[_LAYER] |= {norm: True for norm in _LAYER_NORMS if served[norm]}
    served[_LAYER]["max_position_embeddings"] = _positions(layer, policy, min_context, prefix)
    return served | {"architectures": ["Eagle3Speculator"], "speculators_config": library_fields("eagle3", policy)}


def _checked(config: Fields, file: Path, layer_at: str) -> Drafter:
    """The config of `file`, compared with nothing but itself; a `DrafterError` names the first field that is wrong.

    `layer_at`: what stands before a field of the layer in the file, empty or with a dot at its end.
    """
    layer = config.get(_LAYER)
    if isinstance(layer, dict):
        try:
            rope: object = rope_of(layer)
        except (TypeError, ValueError):  # for the schema to refuse
            rope = layer.get("rope_parameters") or layer.get("rope_scaling")
            rope = rope or {"rope_type": "default", "rope_theta": layer.get("rope_theta")}
        config = {**config, _LAYER: {**layer, "rope_parameters": rope}}
    try:
        drafter = Drafter.model_validate(config)
    except ValidationError as error:
        key, wrong = wrong_field(error)
        raise DrafterError(f"{file}: {key.replace(f'{_LAYER}.', layer_at)} {wrong}") from None
    if drafter.norm_before_fc and drafter.fc_norm:
        raise DrafterError(f"{file}: norm_before_fc and fc_norm are both true, and a drafter has one of them.")
    given, half = drafter.transformer_layer_config.rope_parameters, drafter.transformer_layer_config.head_dim // 2
    if missing := next((key for key in _NEEDS[given.rope_type] if getattr(given, key) is None), None):
        raise DrafterError(f"{file}: {layer_at}rope_parameters of type {given.rope_type!r} need {missing}.")
    for key, factors in (("short_factor", given.short_factor), ("long_factor", given.long_factor)):
        if factors is not None and len(factors) != half:
            raise DrafterError(f"{file}: {layer_at}rope_parameters.{key} must have {half} numbers.")
    return drafter


def _positions(layer: Layer, policy: PolicyShape, min_context: int, prefix: str) -> int:
    """`max_position_embeddings` to serve: at most what an engine of this policy needs; vLLM makes a row for each."""
    context, rope = layer.max_position_embeddings, layer.rope_parameters
    needed = max(min_context, policy.max_position_embeddings + LONGEST_DRAFT)
    if rope.rope_type in COMPUTED_ROPE:
        context = min(context, needed)
    elif context < min_context:
        raise DrafterError(
            f"{prefix}max_position_embeddings={context} is below {min_context}, the longest prompt, response and draft "
            f"together, and positions of RoPE type {rope.rope_type!r} cannot be continued."
        )
    factor = rope.factor if rope.rope_type in _STRETCHED and rope.factor else 1.0
    rows = factor * max(context, rope.original_max_position_embeddings or 0)
    as_policys = rope.model_dump(exclude_none=True) == drafter_rope(policy.rope)  # a table as long as the policy's own
    if rows > _MOST_STRETCH * needed and not as_policys:
        raise DrafterError(
            f"{prefix}rope_parameters and max_position_embeddings ask for a table of {rows:.0f} positions, and the "
            f"policy needs {needed}."
        )
    return context


# ------------------------------------------------------------------ other layouts


def is_other_layout(config: Fields) -> bool:
    return "speculators_model_type" not in config and "hidden_size" in config


def check_kind(config: Fields, file: Path) -> None:
    """Raise a `DrafterError` where a `config.json` in one of these layouts is no EAGLE-3 head of one Llama layer."""
    architectures = list(config.get("architectures") or ())
    if "draft_vocab_size" not in config and not any("Eagle3" in name for name in architectures):
        raise DrafterError(
            f"{file} is no EAGLE-3 drafter: it has neither speculators_model_type nor draft_vocab_size "
            f"(architectures {architectures})."
        )
    if not any(name in _ARCHITECTURES for name in architectures):
        raise DrafterError(f"{file}: architectures must name one of {', '.join(_ARCHITECTURES)}, not {architectures}.")
    for field in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if not isinstance(config.get(field), int) or config[field] < 1:
            raise DrafterError(f"{file}: {field} must be a positive integer, not {config.get(field)!r}.")


def _to_speculators(config: Fields, policy: PolicyShape, file: Path) -> Fields:
    """The config of `file` in speculators' form; a `DrafterError` where it is no EAGLE-3 head of one layer."""
    try:
        check_kind(config, file)
        heads, nested = config["num_attention_heads"], config.get("eagle_config") or {}
        as_is = (
            "vocab_size", "hidden_size", "intermediate_size", "hidden_act", "rms_norm_eps", "layer_types", "mlp_bias",
            "rope_parameters", "rope_scaling", "rope_theta",
        )  # fmt: skip
        layer = {field: config[field] for field in as_is if field in config} | {
            "num_hidden_layers": config.get("num_hidden_layers", 1),
            "num_attention_heads": heads,
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            # Often 2048, the length of their training texts; rotary positions are relative, so longer contexts work.
            "max_position_embeddings": max(config.get("max_position_embeddings", 0), policy.max_position_embeddings),
            "attention_bias": bool(config.get("attention_bias", False)),
        }
        norm_before_fc = bool(nested.get("norm_before_fc", config.get("norm_before_fc", False)))
        return {
            "speculators_model_type": "eagle3",
            _LAYER: layer,
            "draft_vocab_size": config.get("draft_vocab_size") or config.get("vocab_size"),
            "norm_before_fc": norm_before_fc,
            **{norm: bool(config.get(norm, False)) for norm in _LAYER_NORMS},
            _IDS: _aux_layers(config.get(_IDS), nested.get(_IDS), list(aux_layers_for(policy.num_layers)), file),
            "own_head": True,
            "target_hidden_size": config.get("target_hidden_size"),
            "quantization_config": config.get("quantization_config"),
        }
    except (TypeError, AttributeError) as error:
        raise DrafterError(f"{file} has a field of another type than a drafter's: {error}.") from error


def _aux_layers(top_level: Any, nested: Any, usual: list[int], file: Path) -> Any:
    """The layers whose inputs a drafter reads: `top_level` in the config, which counts inputs, or else `nested`.

    vLLM takes the `nested` ones, in `eagle_config`, for inputs; SpecForge and ModelOpt, which write them, and SGLang
    for outputs, one less. They are outputs where that makes `usual`, vLLM's own choice, which both write by default.
    """
    if not nested:
        return top_level or usual
    inputs = [i + 1 for i in nested]
    if inputs == (top_level or usual):
        return inputs
    raise DrafterError(
        f"{file}: eagle_config.{_IDS}={nested} is ambiguous, inputs of layers to vLLM and outputs to SGLang: set "
        f"{_IDS} to the layers whose inputs the drafter reads, and remove it from eagle_config."
    )


# ------------------------------------------------------------------ what is written


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
