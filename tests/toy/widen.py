"""Makes the toy policy slower to decode: same outputs, five or ten times the weights.

Decoding pays for reading weights, so speculation can only win on a policy whose weights are worth reading. The wide
policy computes what the small one does: every second layer adds nothing, and the MLPs are padded. Every added number is
zero on *both* sides of every product, norms included, so its gradient is exactly zero too and AdamW, weight decay
and all, leaves it at zero: the optimizer needs no list of frozen parameters, and the policy is trained as if it were
small. (Random weights behind a zeroed output give the same outputs at first and ruin the policy within an epoch.)

Files become files: building the models would import transformers, which takes longer than everything else here.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.toy.tokenizer import TOKENIZER_FILES

MLP_WIDTH = 4608
"""Width of the wide policy's MLPs: with 8 layers of hidden size 256, 30M parameters."""
HALF_MLP_WIDTH = 2304
"""The same for 16M parameters, which in fp32 are as many bytes as those 30M in bf16."""


def widen(source: Path, target: Path, mlp_width: int) -> None:
    """Write a wide policy with the outputs of `source`, a Qwen3 in one file and in the dtype of that file, to `target`.

    The layers alternate, real then empty, so the input of each empty layer is the output of a real one; the drafter
    reads the outputs of the last three real layers.
    """
    config = json.loads((source / "config.json").read_text())
    wide = dict(_wide_weights(load_file(source / "model.safetensors"), mlp_width))
    target.mkdir(parents=True)
    save_file(wide, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(_wide_config(config, mlp_width), indent=2) + "\n")
    for name in ("generation_config.json", *TOKENIZER_FILES):
        shutil.copyfile(source / name, target / name)


def _wide_config(small: dict[str, Any], mlp_width: int) -> dict[str, Any]:
    depth = 2 * small["num_hidden_layers"]
    return small | {
        "num_hidden_layers": depth,
        "intermediate_size": mlp_width,
        "layer_types": ["full_attention"] * depth,
        "max_window_layers": depth,
    }


def _wide_weights(small: dict[str, Tensor], mlp_width: int) -> Iterator[tuple[str, Tensor]]:
    """Name and weight: the small one's layer i becomes layer 2i, in the corner of its MLPs; layer 2i + 1 is zero."""
    for name, weight in small.items():
        parts = name.split(".")
        if parts[1] != "layers":
            yield name, weight
            continue
        real, empty = (".".join([*parts[:2], str(2 * int(parts[2]) + i), *parts[3:]]) for i in (0, 1))
        shape = list(weight.shape)
        if parts[3] == "mlp":  # [MLP width, hidden], the output projection [hidden, MLP width]
            shape[1 if parts[4] == "down_proj" else 0] = mlp_width
        padded = torch.zeros(shape, dtype=weight.dtype)
        padded[tuple(slice(n) for n in weight.shape)] = weight
        yield real, padded
        yield empty, torch.zeros_like(padded)
