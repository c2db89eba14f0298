"""Makes the toy policy as expensive to decode as a real one is: the same function in ten times the weights.

Decoding pays for reading weights, so speculation can only win on a policy whose weights are worth reading. The wide
policy computes what the small one does: every second layer adds nothing, and the MLPs are padded. Every added number is
zero on *both* sides of every product, norms included, so its gradient is exactly zero too and AdamW, weight decay
and all, leaves it at zero: the optimizer needs no list of frozen parameters, and the policy is trained as if it were
small. (Random weights behind a zeroed output give the same outputs at first and ruin the policy within an epoch.)
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo.toy.tokenizer import TOKENIZER_FILES

MLP_WIDTH = 4608
"""Width of the wide policy's MLPs: with 8 layers of hidden size 256, 30M parameters."""


@dataclass(frozen=True)
class Widened:
    """What `widen` wrote."""

    parameters: int
    """Count of all parameters, the zero ones included."""
    aux_layers: tuple[int, int, int]
    """Layers whose *inputs* tell a drafter most: vLLM's `eagle_aux_hidden_state_layer_ids`."""


def widen(source: Path, target: Path, mlp_width: int = MLP_WIDTH) -> Widened:
    """Write a wide policy with the outputs of `source`, in the dtype of its file, to `target`.

    The layers alternate, real then empty, so the input of each empty layer is the output of a real one; the drafter
    taps the outputs of the last three real layers.

    Raises:
        ValueError: `mlp_width` is below the source's, or the source has fewer than three layers.
    """
    small = Qwen3ForCausalLM.from_pretrained(source, dtype="auto")
    depth = small.config.num_hidden_layers
    if mlp_width < small.config.intermediate_size:
        raise ValueError(f"mlp_width={mlp_width} is below the policy's own {small.config.intermediate_size}.")
    if depth < 3:
        raise ValueError(f"{source} has {depth} layers: a drafter needs three outputs to tap.")
    wide = Qwen3ForCausalLM(_wide_config(small.config, mlp_width)).to(small.dtype)
    wide.load_state_dict({name: _fill(name, w, small.state_dict()) for name, w in wide.state_dict().items()})
    wide.generation_config = small.generation_config
    wide.save_pretrained(target)
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, target / name)
    return Widened(wide.num_parameters(), (2 * depth - 5, 2 * depth - 3, 2 * depth - 1))


def _wide_config(small: Qwen3Config, mlp_width: int) -> Qwen3Config:
    config = copy.deepcopy(small)
    config.num_hidden_layers = 2 * small.num_hidden_layers
    config.intermediate_size = mlp_width
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.max_window_layers = config.num_hidden_layers
    return config


def _fill(name: str, like: Tensor, small: dict[str, Tensor]) -> Tensor:
    """The wide policy's weight `name`, of the shape of `like`: the small one's in the corner, zero elsewhere."""
    parts = name.split(".")
    if parts[1] != "layers":
        return small[name]
    weight = torch.zeros_like(like)
    index = int(parts[2])
    if index % 2 == 0:  # a real layer
        parts[2] = str(index // 2)
        source = small[".".join(parts)]
        weight[tuple(slice(n) for n in source.shape)] = source
    return weight
