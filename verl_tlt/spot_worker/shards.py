"""Captured sequences, put together again where several ranks of the actor hold parts of them.

With sequence, context or pipeline parallelism no rank of the actor has a whole sequence: each sends what it has, and
the spot worker puts the shards together. The actor's ranks gather nothing among themselves, so nothing there can wait
for a rank that failed: a sequence with a missing shard is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from verl_tlt.drafter import TrainingSequence, from_numpy16
from verl_tlt.messages.training import HiddenStateShard


def whole_sequences(shards: Iterable[HiddenStateShard]) -> tuple[list[TrainingSequence], int]:
    """Whole sequences out of what all ranks of one group sent.

    Returns:
        (sequences in row order, on memory of their own; how many were left out because a shard is missing).
    """
    rows: dict[int, list[HiddenStateShard]] = {}
    for shard in shards:
        rows.setdefault(shard.row, []).append(shard)
    found = [_whole_sequence(rows[row]) for row in sorted(rows)]
    whole = [sequence for sequence in found if sequence is not None]
    return whole, len(found) - len(whole)


def _whole_sequence(shards: list[HiddenStateShard]) -> TrainingSequence | None:
    """One sequence; None where not every state of every token is there."""
    head = shards[0]
    length, hidden = len(head.tokens), head.states.shape[-1]
    states = np.empty((length, len(head.wanted), hidden), head.states.dtype)
    known = np.zeros((length, len(head.wanted)), bool)
    for shard in shards:
        at = 0
        for begin, end in shard.stretches:
            for layer, held in zip(shard.layers, shard.states, strict=True):
                column = head.wanted.index(layer)
                states[begin:end, column] = held[at : at + end - begin]
                known[begin:end, column] = True
            at += end - begin
    if not known.all():
        return None
    wide = from_numpy16(states.reshape(length, -1))  # [L, 4H]
    return TrainingSequence(
        tokens=torch.from_numpy(head.tokens.copy()),  # the store's arrays are read-only
        prompt_len=head.prompt_len,
        aux=wide[:, :-hidden],
        last=wide[:, -hidden:],
        start=head.start,
    )
