"""Names of a drafter's tensors in files and in vLLM, and of the policy's tensors that it shares.

speculators, and our files    layers.0.self_attn.q_proj.weight
SafeAILab/EAGLE, SpecForge    midlayer.self_attn.q_proj.weight
vLLM, live                    model.layers.0.self_attn.qkv_proj.weight: q, k and v stacked, as are gate and up

Every other name is the same for all, but for the `model.` that vLLM puts in front.
"""

from __future__ import annotations

import re

_STACKED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
_POLICY = {
    part: re.compile(rf"(?:(?:base_model|model|language_model)\.)*{ending}\.weight")
    for part, ending in (("embed", "embed_tokens"), ("lm_head", "lm_head"), ("norm", r"(?:model|language_model)\.norm"))
}


def policy_part(name: str) -> str | None:
    """Which part of a policy its tensor is: "embed", "lm_head", "norm" (the final one); None: one of all the others.

    Args:
        name: as transformers saves it, and verl's weight sync calls it; a vision-language model's decoder is inside
            its `language_model`.
    """
    return next((part for part, pattern in _POLICY.items() if pattern.fullmatch(name)), None)


def plain(name: str) -> str:
    """Any of these names as speculators has it, but for what vLLM stacked."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def stacked(name: str) -> str:
    """The plain name of the tensor in which vLLM keeps this one; the same for all that it stacks there."""
    name = plain(name)
    for pattern, stack in _STACKED:
        name = pattern.sub(stack, name)
    return name


def live(name: str) -> str:
    """The name of vLLM's parameter that holds this tensor."""
    name = stacked(name)
    return name if name.startswith("lm_head.") else f"model.{name}"
