"""Captured sequences, put together again where several ranks of the actor share them.

With sequence, context or pipeline parallelism no rank of the actor sees a whole sequence: each sends what it has, and
the spot worker joins the parts. Nothing is gathered between the actor's ranks, so nothing there can wait for a rank
that failed: a sequence with a missing part is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_tlt.messages import HiddenStateShard


def join(ranks: Sequence[Sequence[HiddenStateShard]], aux_layers: Sequence[int]) -> tuple[list[dict[str, Any]], int]:
    """Whole sequences out of what every rank of one group sent.

    Args:
        ranks: each rank's parts.
        aux_layers: layers whose inputs the drafter reads.

    Returns:
        (sequences in row order, each {"tokens", "prompt_len", "start", "aux": 16-bit [L, 3H], "last": 16-bit [L, H]};
        how many were left out because a part is missing).
    """
    rows: dict[int, list[HiddenStateShard]] = {}
    for part in (part for parts in ranks for part in parts):
        rows.setdefault(part.row, []).append(part)
    joined = []
    for row in sorted(rows):
        parts = rows[row]
        head = parts[0]
        columns = {layer: _column(parts, layer) for layer in {*aux_layers, head.last}}
        if all(column is not None for column in columns.values()):
            joined.append(
                {
                    "tokens": head.tokens,
                    "prompt_len": head.prompt_len,
                    "start": head.start,
                    "aux": np.concatenate([columns[layer] for layer in aux_layers], axis=-1),
                    "last": columns[head.last],
                }
            )
    return joined, len(rows) - len(joined)


def _column(parts: Sequence[HiddenStateShard], layer: int) -> np.ndarray | None:
    """One layer's states [L, H] of a window; None where not every token's is there."""
    holders = [p for p in parts if layer in p.states]
    if not holders:
        return None
    length = len(holders[0].tokens)
    if holders[0].stretches == ((0, length),):
        return holders[0].states[layer]
    example = holders[0].states[layer]
    whole = np.empty((length, example.shape[-1]), example.dtype)
    known = np.zeros(length, bool)
    for part in holders:
        at = 0
        for begin, end in part.stretches:
            whole[begin:end] = part.states[layer][at : at + end - begin]
            known[begin:end] = True
            at += end - begin
    return whole if known.all() else None
