"""Drafters of SpecForge, SafeAILab/EAGLE and ModelOpt in the layout of speculators.

The network is the same in all. A drafter from elsewhere differs in two things: its head is trained and stays
(`own_head` in the config), and the residual is taken before `hidden_norm`; `speculators.convert` knows of neither.

Sources: SafeAILab/EAGLE `eagle/model/cnets.py`; SpecForge `specforge/modeling/draft/llama3_eagle.py` and `configs/`;
ModelOpt `export/plugins/hf_spec_export.py`; SGLang `set_eagle3_layers_to_capture`; vLLM `llama_eagle3.py`.
"""

from pathlib import Path
from typing import Any

from verl_tlt.drafter.policy import DrafterError, Fields, PolicyShape, aux_layers_for
from verl_tlt.drafter.tensor_file import plain

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_NOT_NEEDED = ("embed_tokens.", "rotary_emb.")
"""A frozen copy of the policy's embedding, and tables that are computed."""
_IDS = "eagle_aux_hidden_state_layer_ids"
MAPS = ("d2t", "t2d")
"""Tensors of a pruned draft vocabulary: int64 [DV] target id less draft id, and bool [V] whether a token is kept."""


def is_other_layout(config: Fields) -> bool:
    return "speculators_model_type" not in config and "hidden_size" in config


def to_speculators_config(config: Fields, policy: PolicyShape, file: Path) -> Fields:
    """The config of `file` in speculators' form; a `DrafterError` where it is no EAGLE-3 head of one layer."""
    try:
        check_kind(config, file)
        nested = config.get("eagle_config") or {}
        ids = _aux_layers(config.get(_IDS), nested.get(_IDS), list(aux_layers_for(policy.num_layers)), file)
        layer = _layer(config, policy)
        switches = {norm: bool(config.get(norm, False)) for norm in ("norm_before_fc", "fc_norm", "norm_output")}
    except (TypeError, AttributeError) as error:
        raise DrafterError(f"{file} has a field of another type than a drafter's: {error}.") from error
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": config.get("draft_vocab_size") or config.get("vocab_size"),
        **switches | {key: bool(value) for key, value in nested.items() if key == "norm_before_fc"},
        _IDS: ids,
        "own_head": True,
        "target_hidden_size": config.get("target_hidden_size"),
        "quantization_config": config.get("quantization_config"),
    }


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


def _layer(config: Fields, policy: PolicyShape) -> Fields:
    heads = config["num_attention_heads"]
    as_is = (
        "vocab_size", "hidden_size", "intermediate_size", "hidden_act", "rms_norm_eps", "layer_types", "mlp_bias",
        "rope_parameters", "rope_scaling", "rope_theta",
    )  # fmt: skip
    return {
        **{field: config[field] for field in as_is if field in config},
        "num_hidden_layers": config.get("num_hidden_layers", 1),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        # Often 2048, the length of their training texts; rotary positions are relative, so longer contexts work.
        "max_position_embeddings": max(config.get("max_position_embeddings", 0), policy.max_position_embeddings),
        "attention_bias": bool(config.get("attention_bias", False)),
    }


def speculators_name(name: str) -> str | None:
    """A tensor's name in speculators' layout; None for what is not needed."""
    name = plain(name)
    return None if any(part in name for part in _NOT_NEEDED) else name
