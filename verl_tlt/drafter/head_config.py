"""Reads an EAGLE-3 head's `config.json` in each public layout, as vLLM reads it, and writes speculators' layout.

speculators nests the head's one layer (`transformer_layer_config`). SpecForge, SafeAILab/EAGLE and ModelOpt write flat
configs. Most of their heads have an output head of their own (`own_head`), which `speculators.convert` does not know.

A field that the file leaves out has vLLM's default for that layout. A field of another network than the one that is
served is refused. All others are dropped: what is staged for vLLM cannot name code, another model or a dtype.
tests/contract/test_head_fields.py compares the fields below with those that the installed vLLM reads.

Sources: vLLM `llama_eagle3.py`, `llama.py`, `speculators/algos.py` (`update_eagle3`); SafeAILab/EAGLE `cnets.py`;
SpecForge `configs/`; ModelOpt `export/plugins/hf_spec_export.py`; SGLang `set_eagle3_layers_to_capture`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tlt import LONGEST_DRAFT
from verl_tlt.drafter.model_files import first_line
from verl_tlt.drafter.policy import (
    COMPUTED_ROPE,
    MTP,
    Fields,
    PolicyShape,
    aux_layers_for,
    check_aux_layers,
    drafter_rope,
    quiet,
    rope_of,
)
from verl_tlt.errors import DrafterError, wrong_field
from verl_tlt.files.disk import CONFIG
from verl_tlt.files.json_files import read_json

if TYPE_CHECKING:
    from transformers import LlamaConfig

LAYER = "transformer_layer_config"
IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_DEFAULTS: Fields = {
    "draft_vocab_size": None, "norm_before_residual": True, "norm_before_fc": False, "fc_norm": False,
    "norm_output": False, "target_hidden_size": None, IDS: None,
}  # fmt: skip
"""Fields of the head beside its layer, with what vLLM takes where a config in speculators' layout leaves them out."""
LAYER_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings", "attention_bias", "rope_parameters",
)  # fmt: skip
"""Fields of the layer that are carried over."""
ONLY: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,), "hidden_act": ("silu",), "mlp_bias": (False,), "bias": (False,), "qkv_bias": (False,),
    "is_causal": (True,), "logit_scale": (1,), "num_aux_hidden_states": (3,), "quantization_config": (),
    "partial_rotary_factor": (1,), "layer_types": ("full_attention",),
    "use_aux_hidden_state": (True,),
}  # fmt: skip
"""Fields that vLLM reads and that are not carried over, and their values in the network that is served."""
ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)  # fmt: skip
"""Of heads in a flat layout: names of one class in vLLM."""
_NORMS = ("fc_norm", "norm_output")
"""Switches that vLLM 0.24 reads in the layer's config alone."""


def read_config(path: Path, policy: PolicyShape, min_context: int = 0) -> Fields:
    """The config to stage for the EAGLE-3 head in `path`; a `DrafterError` where it does not fit `policy`.

    `check_config` has accepted the head before.
    """
    file = path / CONFIG
    config = read_json(file)
    try:
        return _read(config, policy, min_context, file)
    except KeyError as error:
        raise DrafterError(f"{file} has no field {error.args[0]!r}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DrafterError):
            raise
        raise DrafterError(f"{file} has a field of a kind that no head's has: {first_line(error)}.") from error


def _read(config: Fields, policy: PolicyShape, min_context: int, file: Path) -> Fields:
    flat_layout = is_flat(config)
    flat = config if flat_layout else _flattened(config, file)
    nested = flat.get("eagle_config") or {}
    _check_network(flat, nested, file)
    layer = _layer(flat, file)
    _check_sizes(flat, layer, policy, file)
    layers = flat.get(IDS) or list(aux_layers_for(policy.num_layers))  # the latter is vLLM's own choice
    if flat_layout and nested.get(IDS):
        _check_nested_layers(nested[IDS], layers, file)
    if not isinstance(layers, list) or not all(type(number) is int for number in layers):
        raise DrafterError(f"{file}: {IDS} must be a list of layer numbers, not {str(layers)[:80]}.")
    check_aux_layers(layers, policy.num_layers, f"{file}: {IDS}")
    if flat_layout:  # often 2048, the length of the training texts; positions are relative
        layer["max_position_embeddings"] = max(layer["max_position_embeddings"], policy.max_position_embeddings)
    layer["max_position_embeddings"] = _positions(layer, policy, min_context, file)
    fields = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": flat.get("draft_vocab_size") or layer["vocab_size"],
        "norm_before_residual": flat.get("norm_before_residual", False),
        "norm_before_fc": nested.get("norm_before_fc", flat.get("norm_before_fc", False)),
        **{norm: flat.get(norm, False) for norm in _NORMS},
        IDS: layers,
        "speculators_config": library_fields("eagle3", policy),
    }
    if layer["hidden_size"] != policy.hidden_size:  # so neither embedding nor output head can be the policy's
        fields |= {"target_hidden_size": policy.hidden_size, "own_head": True}
    elif not flat_layout and config.get("own_head") is not None:
        fields["own_head"] = config["own_head"]
    fields[LAYER] = layer | {norm: True for norm in _NORMS if fields[norm]}
    return _validated(fields, policy, file)


def _check_network(flat: Fields, nested: Fields, file: Path) -> None:
    """Raise a `DrafterError` where a field describes another network than the one that is served (`ONLY`)."""
    layer_types = list(flat.get("layer_types") or [None])
    read = {
        **flat,
        "use_aux_hidden_state": nested.get("use_aux_hidden_state"),
        "layer_types": layer_types[0],  # of the one layer
    }
    for field, values in ONLY.items():
        value = read.get(field)
        if value is not None and value not in values:
            must = f"must be {values[0]!r}" if values else "must not be set"
            raise DrafterError(f"{file}: {field}={value!r}, but of the heads that are served it {must}.")


def _check_sizes(flat: Fields, layer: Fields, policy: PolicyShape, file: Path) -> None:
    """Raise a `DrafterError` where the head was made for hidden states or a vocabulary of another size."""
    states = "target_hidden_size" if flat.get("target_hidden_size") is not None else "hidden_size"
    for field, value, expected in (
        (states, flat[states], policy.hidden_size),
        ("vocab_size", layer["vocab_size"], policy.vocab_size),
    ):
        if value != expected:
            raise DrafterError(f"{file}: {field}={value}, but the policy's is {expected} ({policy.source}).")


def _flattened(config: Fields, file: Path) -> Fields:
    """A config in speculators' layout as vLLM makes a flat one of it (`update_eagle3`)."""
    layer = config.get(LAYER)
    if not isinstance(layer, dict) or layer.get("model_type", "llama") != "llama":
        kind = layer.get("model_type") if isinstance(layer, dict) else layer
        raise DrafterError(f"{file}: {LAYER} must describe a layer of model_type 'llama', not {str(kind)[:80]!r}.")
    if config.get("quantization_config") is not None:
        raise DrafterError(f"{file}: quantization_config must not be set: quantized drafters are not served.")
    beside = {field: config.get(field, default) for field, default in SPECULATORS_DEFAULTS.items()}
    return {**layer, **beside}


def _layer(flat: Fields, file: Path) -> Fields:
    """The fields of the head's layer; those that the file leaves out are `LlamaConfig`'s defaults, as in vLLM."""
    needed = LAYER_FIELDS[:4]
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    given_optional = [field for field in optional if flat.get(field) is not None]
    for field in (*needed, *given_optional):
        if type(flat[field]) is not int or flat[field] < 1:
            raise DrafterError(f"{file}: {field} must be a positive integer, not {flat[field]!r}.")
    try:
        rope = rope_of(flat)
    except (TypeError, ValueError) as error:
        raise DrafterError(f"{file}: rope_parameters must be an object, as transformers writes it: {error}.") from error
    if rope.get("partial_rotary_factor", 1) != 1:
        raise DrafterError(f"{file}: partial_rotary_factor must be 1 in the heads that are served.")
    if flat["num_attention_heads"] % (flat.get("num_key_value_heads") or 1):
        raise DrafterError(f"{file}: num_attention_heads must be a multiple of num_key_value_heads.")
    given = {field: flat[field] for field in LAYER_FIELDS if flat.get(field) is not None}
    try:
        with quiet():
            layer = _layer_class()(**given | {"rope_parameters": drafter_rope(rope)}).to_dict()
    except Exception as error:  # whatever transformers raises for a layer that it cannot build
        raise DrafterError(f"{file} describes no layer of a Llama model: {first_line(error)}.") from error
    return {
        "model_type": "llama",
        **{field: layer.get(field) for field in LAYER_FIELDS},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }


def _positions(layer: Fields, policy: PolicyShape, min_context: int, file: Path) -> int:
    """`max_position_embeddings` to serve: at most what an engine of this policy needs; vLLM makes a row for each."""
    context = layer["max_position_embeddings"]
    rope = layer["rope_parameters"]
    kind = rope["rope_type"]
    if kind == "yarn":  # vLLM's table has so many rows, whatever the config says
        context = int(rope["original_max_position_embeddings"] * rope["factor"]) + LONGEST_DRAFT
    if kind in COMPUTED_ROPE:
        return min(context, max(min_context, policy.max_position_embeddings + LONGEST_DRAFT))
    if context < min_context:
        raise DrafterError(
            f"{file}: with RoPE of type {kind!r} this head has {context} positions in vLLM and cannot have more, but "
            f"the longest prompt, response and draft together need {min_context}."
        )
    return context


def _validated(fields: Fields, policy: PolicyShape, file: Path) -> Fields:
    """The fields, if speculators' own classes take them."""
    from pydantic import ValidationError

    try:
        drafted = config_of(fields).draft_vocab_size
    except ValidationError as error:
        key, wrong = wrong_field(error)
        raise DrafterError(f"{file}: {key} {wrong}") from None
    if not 1 <= drafted <= policy.vocab_size:
        raise DrafterError(f"{file}: draft_vocab_size must be 1..{policy.vocab_size}, not {drafted}.")
    return fields


# ------------------------------------------------------------------ flat layouts


def is_flat(config: Fields) -> bool:
    return "speculators_model_type" not in config and "hidden_size" in config


def check_kind(config: Fields, file: Path) -> None:
    """Raise a `DrafterError` where a flat `config.json` is no EAGLE-3 head of one Llama layer."""
    named = config.get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else []
    if "draft_vocab_size" not in config and not any("Eagle3" in name for name in architectures):
        raise DrafterError(
            f"{file} is no EAGLE-3 drafter: it has neither speculators_model_type nor draft_vocab_size "
            f"(architectures {architectures})."
        )
    if not any(name in ARCHITECTURES for name in architectures):
        raise DrafterError(f"{file}: architectures must name one of {', '.join(ARCHITECTURES)}, not {architectures}.")


def _check_nested_layers(nested: list[int], layers: list[int], file: Path) -> None:
    """Raise a `DrafterError` where the layer numbers in `eagle_config` may mean others than `layers`.

    To vLLM a number there is the layer whose input is read, to SGLang the layer whose output is read. They are accepted
    only where SGLang, too, would read the inputs of `layers`: each number is then one less.
    """
    if [number + 1 for number in nested] != layers:
        raise DrafterError(
            f"{file}: eagle_config.{IDS}={nested} is ambiguous, inputs of layers to vLLM and outputs to SGLang: set "
            f"{IDS} to the layers whose inputs the drafter reads, and remove it from eagle_config."
        )


# ------------------------------------------------------------------ what is written


def config_of(fields: Fields) -> Any:
    """The config of speculators that a drafter's `config.json` with these fields is read as."""
    from speculators import SpeculatorModelConfig

    if fields["speculators_model_type"] != MTP:
        fields = {**fields, LAYER: _layer_class()(**fields[LAYER])}
    return SpeculatorModelConfig.from_dict(fields)


@cache
def _layer_class() -> type[LlamaConfig]:
    """The class of a drafter's layer config."""
    from transformers import LlamaConfig

    class Layer(LlamaConfig):
        """`LlamaConfig` for any number of heads: with a `head_dim` they need not divide the hidden size."""

        def validate_architecture(self) -> None:
            """Nothing to validate: `head_dim` is always given."""

    return Layer


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
