"""EAGLE-3 drafters in the layout of SafeAILab/EAGLE and SpecForge, read as what they are: the same network.

    config.json       a flat Llama config with `draft_vocab_size`; architectures ["LlamaForCausalLMEagle3"]
    model.safetensors (SpecForge) or pytorch_model.bin (SafeAILab; see `drafter.pickled`): midlayer.*, fc, norm, ...

Three things differ from a drafter made here. Their head is trained, so it is kept and never replaced by the policy's
(`config.own_head`). The residual is taken before `hidden_norm` (`norm_before_residual=False`). And where SpecForge
names aux layers, in `eagle_config`, it counts layer *outputs*: one less than the inputs that vLLM and we count.

Sources: SafeAILab/EAGLE `eagle/model/cnets.py`; SpecForge `specforge/modeling/draft/llama3_eagle.py` and `configs/`;
SGLang `set_eagle3_layers_to_capture`, which adds the one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tlt.drafter.names import plain
from verl_tlt.drafter.policy import DrafterError, PolicyShape, aux_layers_for, rope_of

if TYPE_CHECKING:
    import torch

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_IGNORED = ("embed_tokens.", "rotary_emb.")
"""A frozen copy of the policy's embedding, and tables that are computed."""


def is_foreign(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is in one of these layouts."""
    return "speculators_model_type" not in config and "hidden_size" in config


def as_speculators(config: Mapping[str, Any], policy: PolicyShape, file: Path) -> dict[str, Any]:
    """The same drafter's config in speculators' form.

    Args:
        config: what `file` holds.
        policy: gives what these layouts leave out: aux layers, and a context, which their training length is not.
        file: for messages.

    Raises:
        DrafterError: no EAGLE-3 head of one Llama layer, or a field is missing.
    """
    architectures = list(config.get("architectures") or ())
    if "draft_vocab_size" not in config and not any("Eagle3" in name for name in architectures):
        raise DrafterError(
            f"{file} is no EAGLE-3 drafter: it has neither speculators_model_type nor draft_vocab_size "
            f"(architectures {architectures})."
        )
    if not any(name in _ARCHITECTURES for name in architectures):
        raise DrafterError(f"{file}: architectures must name one of {', '.join(_ARCHITECTURES)}, not {architectures}.")
    hidden = config["hidden_size"]
    if config.get("target_hidden_size", hidden) != hidden:
        raise DrafterError(
            f"{file}: target_hidden_size={config['target_hidden_size']} differs from hidden_size={hidden}; "
            "only drafters as wide as their policy can share its embedding."
        )
    for field in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if not isinstance(config.get(field), int):
            raise DrafterError(f"{file}: {field} must be an integer, not {config.get(field)!r}.")
    heads = config["num_attention_heads"]
    layer = {
        "model_type": "llama",
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config.get("num_hidden_layers", 1),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "hidden_act": config.get("hidden_act", "silu"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        # Often 2048, the length of their training texts; rotary positions are relative, so longer contexts work.
        "max_position_embeddings": max(config.get("max_position_embeddings", 0), policy.max_position_embeddings),
        "rope_parameters": rope_of(config),
        "attention_bias": bool(config.get("attention_bias", False)),
        "tie_word_embeddings": False,
    }
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = config.get("eagle_aux_hidden_state_layer_ids") or (nested and [i + 1 for i in nested])
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "norm_before_residual": False,
        "norm_before_fc": bool(config.get("norm_before_fc", False)),
        "fc_norm": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False)),
        "eagle_aux_hidden_state_layer_ids": ids or list(aux_layers_for(policy.num_layers)),
        "own_head": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": list(policy.architectures)},
        },
    }


def renamed(name: str) -> str | None:
    """A tensor's name in speculators' layout; None for what is not needed."""
    name = plain(name)
    return None if any(part in name for part in _IGNORED) else name


def as_named_here(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors needed, renamed; maps of a vocabulary that is whole are left out."""
    named = {new: tensor for name, tensor in tensors.items() if (new := renamed(name)) is not None}
    if "d2t" in named and "lm_head.weight" in named:
        if len(named["d2t"]) == len(named.get("t2d", ())):  # the whole vocabulary needs no maps
            del named["d2t"], named["t2d"]
        elif "t2d" in named:
            named["t2d"] = named["t2d"].bool()
    return named
