"""Finite logits for a drafter whose weights or activations overflow: then its drafts are poor, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

HEADROOM = 128
"""Logits are held below the largest number by this factor; vLLM divides them by a temperature of 0.01 at least."""


# Changes vllm: patches/README.md#a-drafters-logits-are-finite
def keep_logits_finite(drafter: Eagle3LlamaForCausalLM) -> None:
    """Have the drafter compute finite logits, before a token is drawn from them: NaN becomes 0.

    vLLM draws a draft from these logits and verifies it with their softmax, so sampling is exact whatever they are. A
    row of NaN drafts uniformly. An exception here is one in the drafter's pass (`drafter_pass.ContainedPass`).
    """
    compute = drafter.compute_logits

    def finite(*args: object, **kwargs: object) -> torch.Tensor:
        logits: torch.Tensor = compute(*args, **kwargs)  # [rows, vocab]
        limit = torch.finfo(logits.dtype).max / HEADROOM
        return logits.nan_to_num_(nan=0.0).clamp_(-limit, limit)

    drafter.compute_logits = finite
