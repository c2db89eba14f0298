"""Whole training sequences, put together from what each of the actor's ranks captured."""

from collections.abc import Iterable

import numpy as np
import torch

from verl_tlt.drafter import TrainingSequence, from_numpy16
from verl_tlt.messages.training import HiddenStateShard


def whole_sequences(shards: Iterable[HiddenStateShard]) -> tuple[list[TrainingSequence], int]:
    """Join what all ranks of one group sent: (whole sequences in row order, number of those that lack a shard)."""
    rows: dict[int, list[HiddenStateShard]] = {}
    for shard in shards:
        rows.setdefault(shard.row, []).append(shard)
    joined = [_join(rows[row]) for row in sorted(rows)]
    whole = [sequence for sequence in joined if sequence is not None]
    return whole, len(joined) - len(whole)


def _join(shards: list[HiddenStateShard]) -> TrainingSequence | None:
    """One sequence out of its shards; None where not every state of every token is there."""
    head = shards[0]
    length = len(head.tokens)
    hidden = head.states.shape[-1]
    states = np.empty((length, len(head.wanted), hidden), head.states.dtype)
    filled = np.zeros((length, len(head.wanted)), bool)
    for shard in shards:
        at = 0
        for begin, end in shard.stretches:
            for layer, inputs in zip(shard.layers, shard.states, strict=True):
                column = head.wanted.index(layer)
                states[begin:end, column] = inputs[at : at + end - begin]
                filled[begin:end, column] = True
            at += end - begin
    if not filled.all():
        return None
    wide = from_numpy16(states.reshape(length, -1))  # [L, 4H]
    return TrainingSequence(
        tokens=torch.from_numpy(head.tokens.copy()),  # the store's arrays are read-only
        prompt_len=head.prompt_len,
        aux=wide[:, :-hidden],
        last=wide[:, -hidden:],
        start=head.start,
        prompt=head.prompt,
        foreign=head.foreign,
    )
