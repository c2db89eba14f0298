"""What vLLM's CPU backend needs for RL with speculation, one function each; `patches/vllm` has the upstream form.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It does nothing unless
`VERL_PLATFORM=cpu`, so a GPU installation never sees it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from verl_tlt.hooks import when_imported

if TYPE_CHECKING:
    import torch


def _plain_linear(layer: Any, remove_weight: bool = False) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear


def keep_linear_weights(module: Any) -> None:
    """Leave linear weights as they were loaded.

    `dispatch_cpu_unquantized_gemm` repacks them and empties `.weight`, after which no weight sync can load into the
    live model (vllm/model_executor/layers/utils.py; linear.py and vocab_parallel_embedding.py import it at call time).
    """
    module.dispatch_cpu_unquantized_gemm = _plain_linear


def expand_batch_to_tokens(
    x: torch.Tensor,  # [batch]
    cu_num_tokens: torch.Tensor,  # [batch], cumulative draft counts
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """x[i] for each draft token of request i, `replace_from` turned into `replace_to`: [num_tokens], x's dtype."""
    import torch

    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.long))  # [batch]
    expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)  # [num_tokens]
    return expanded.masked_fill(expanded == replace_from, replace_to)


def fix_expand_batch(module: Any) -> None:
    """Give the rejection sampler per-token temperature, top-k and top-p that are set.

    The CPU kernel writes into an int64 copy that never returns (vllm/utils/cpu_triton_utils.py), so sampling above
    temperature 0 reads uninitialised memory: wrong distributions, NaN, or an index error.
    """
    module.expand_batch_to_tokens = expand_batch_to_tokens


def register() -> None:
    """Arm every shim in this process, on the CPU platform only."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    when_imported("vllm.model_executor.layers.utils", keep_linear_weights)
    when_imported("vllm.v1.sample.rejection_sampler", fix_expand_batch)
