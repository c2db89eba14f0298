"""Attention over a packed row, one document at a time, for training on a CPU.

Each pass of a training-time test adds S keys to a row of S positions, of which a position attends to one. A dense mask
computes all S x (passes x S) scores, and a small model's step takes 1.5 times as long on a CPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

BY_DOCUMENT = "tlt_by_document"
"""Name for `_attn_implementation`."""


def register() -> str:
    """Make `attend_by_document` known to transformers; its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(BY_DOCUMENT, attend_by_document)
    return BY_DOCUMENT


def attend_by_document(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax attention under the mask of `speculators` (`create_combined_mask_mod`), as transformers calls it.

    `query` is [1, heads, S, head_dim], `key` and `value` [1, kv_heads, P * S, head_dim] in pass P of a training-time
    test. `attention_mask`, bool [1, 1, S, P * S], is causal within documents in the first S columns, and the diagonal
    of each further S; padding attends to itself alone. Returns [1, S, heads, head_dim], and no weights.
    """
    heads, rows, width = query.shape[1:]
    passes, groups = key.shape[2] // rows, heads // key.shape[1]
    q = query[0] * (width**-0.5 if scaling is None else scaling)  # [heads, S, head_dim]
    k, v = (
        x[0].repeat_interleave(groups, dim=0).view(heads, passes, rows, width) for x in (key, value)
    )  # [heads, P, S, .]
    later = (q[:, None] * k[:, 1:]).sum(-1).transpose(1, 2)  # [heads, S, P-1] scores of each position's own later keys
    parts = []
    for begin, end, length in _documents(attention_mask[0, 0, :, :rows]):
        here, count = slice(begin, end), (end - begin) // length
        # Documents of one token (padding) are handled side by side; each attends to itself.
        q_own, k_own, v_own = (
            x[:, here].reshape(heads, count, length, width) for x in (q, k[:, 0], v[:, 0])
        )  # [heads, n, L, .]
        scores = q_own @ k_own.transpose(2, 3)  # [heads, n, L, L]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        after = later[:, here].reshape(heads, count, length, passes - 1)  # [heads, n, L, P-1]
        weights = torch.cat([scores.masked_fill(future, -torch.inf), after], dim=-1).softmax(-1)
        first = (weights[..., :length] @ v_own).flatten(1, 2)  # [heads, n * L, head_dim]
        others = weights[..., length:].flatten(1, 2).transpose(1, 2)  # [heads, P-1, n * L]
        parts.append(first + (others[..., None] * v[:, 1:, here]).sum(1))
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _documents(mask: torch.Tensor) -> list[tuple[int, int, int]]:
    """(begin, end, length of each) of the documents in a bool [S, S] mask that is causal within each.

    Those of one token that follow each other are one entry. Another mask, as of a sliding window, is a `ValueError`.
    """
    index = torch.arange(len(mask), device=mask.device)
    starts = mask.int().argmax(dim=1)  # [S] the first position that each one attends to
    if not torch.equal(mask.sum(dim=1), index - starts + 1):
        raise ValueError(f"Attention {BY_DOCUMENT!r} needs a mask that is causal within whole documents.")
    borders = [*sorted(set(starts.tolist())), len(mask)]
    found: list[tuple[int, int, int]] = []
    for begin, end in itertools.pairwise(borders):
        length = end - begin
        joins = length == 1 and bool(found) and found[-1][2] == 1
        found.append((found.pop()[0] if joins else begin, end, length))
    return found
