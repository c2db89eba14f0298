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
    kv, passes = key.shape[1], key.shape[2] // rows
    groups = heads // kv  # query heads that share keys and values, which are not repeated for each
    q = (query[0] * (width**-0.5 if scaling is None else scaling)).view(kv, groups, rows, width)
    k, v = (x[0].view(kv, 1, passes, rows, width) for x in (key, value))
    later = (q[:, :, None] * k[:, :, 1:]).sum(-1).transpose(2, 3)  # [kv, G, S, P-1] each position's own later keys
    parts = []
    for begin, end, length in _documents(attention_mask[0, 0, :, :rows]):
        here, count = slice(begin, end), (end - begin) // length
        # Documents of one token (padding) are handled side by side; each attends to itself.
        q_own, after = (_by_document(x[:, :, here], count) for x in (q, later))  # [kv, n, G, L, .]
        k_own, v_own = (x[:, 0, 0, here].reshape(kv, count, length, width) for x in (k, v))
        scores = (q_own.flatten(2, 3) @ k_own.transpose(2, 3)).view(kv, count, groups, length, length)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = torch.cat([scores.masked_fill(future, -torch.inf), after], dim=-1).softmax(-1)
        first = (weights[..., :length].flatten(2, 3) @ v_own).view(q_own.shape)
        others = weights[..., length:].transpose(1, 2).flatten(2, 3)  # [kv, G, n * L, P-1]
        own = first.transpose(1, 2).flatten(2, 3)  # [kv, G, n * L, head_dim]
        parts.append(own + (others.transpose(2, 3)[..., None] * v[:, :, 1:, here]).sum(2))
    return torch.cat(parts, dim=2).flatten(0, 1).transpose(0, 1)[None], None


def _by_document(values: torch.Tensor, count: int) -> torch.Tensor:
    """[kv, G, n * L, .] as [kv, n, G, L, .]: each of `count` documents apart, with all heads that share its keys."""
    kv, groups, rows, width = values.shape
    return values.reshape(kv, groups, count, rows // count, width).transpose(1, 2)


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
