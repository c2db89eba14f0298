"""Where a Hugging Face policy keeps what a drafter reads of it: its decoder layers and its final norm, by one rule.

The language model's decoder is the module that holds a list of as many layers as the config says, and one norm beside
it. That is how transformers lays out every decoder, whatever it calls them and however deep inside a larger model it
lies; a vision tower has another number of layers, or norms elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from verl_tlt.errors import DrafterError


@dataclass(frozen=True)
class Decoder:
    """Of a policy's language model."""

    model: torch.nn.Module
    """Takes `input_ids`."""
    layers: torch.nn.ModuleList
    """Each layer's input is the residual stream before it."""
    norm: torch.nn.Module
    """Its input is the last hidden state, its output what the head reads."""


def find_decoder(policy: Any, where: str) -> Decoder:
    """The decoder of `policy`'s language model.

    Args:
        policy: a transformers model; FSDP and LoRA inside it change nothing.
        where: the key or option that named it, for the message.

    Raises:
        DrafterError: no module of it looks like its decoder, or more than one does.
    """
    config = getattr(policy, "config", None)
    count = None if config is None else config.get_text_config(decoder=True).num_hidden_layers
    found = []
    for module in policy.modules():
        parts = dict(module.named_children())
        lists = [part for part in parts.values() if isinstance(part, torch.nn.ModuleList) and len(part) == count]
        norms = [part for name, part in parts.items() if "norm" in name]
        if len(lists) == len(norms) == 1:
            found.append(Decoder(module, lists[0], norms[0]))
    if len(found) != 1:
        raise DrafterError(
            f"{where} is a {type(policy).__name__}, in which {len(found) or 'no'} modules hold a list of "
            f"{count or 'decoder'} layers with one norm beside it; its language model's decoder should be the only one."
        )
    return found[0]
