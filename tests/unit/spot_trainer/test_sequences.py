"""Captured sequences: joined whatever rank holds what, and left out where a part is missing."""

import numpy as np
import pytest

from verl_tlt.drafter.data import within
from verl_tlt.messages.training import HiddenStateShard
from verl_tlt.spot_trainer.sequences import whole_sequences

WANTED, H = (1, 2, 4), 3
LENGTHS = [11, 8, 29]


def state(row, layer, token):
    return 500 * row + 100 * layer + token  # float16 has these exactly


def shard(row, stretches, layers, start=0, stop=None):
    """What a rank sends of tokens [start, stop), of which it holds `stretches` (counted in the whole sequence)."""
    stop = stop or LENGTHS[row]
    held = [t for a, b in stretches for t in range(a, b)]
    return HiddenStateShard(
        row, np.arange(start, stop), max(0, 4 - start), row, start,
        tuple((a - start, b - start) for a, b in stretches), WANTED, layers,
        np.array([[[state(row, layer, t)] * H for t in held] for layer in layers], np.float16),
    )  # fmt: skip


def check(sequence, row):
    for layer, columns in zip(WANTED, (*sequence.aux.split(H, dim=-1), sequence.last), strict=True):
        assert columns.tolist() == [[state(row, layer, t)] * H for t in sequence.tokens.tolist()]


def test_what_the_object_store_lends_is_not_kept():
    lent = shard(0, [(0, LENGTHS[0])], WANTED)
    lent.tokens.flags.writeable = lent.states.flags.writeable = False
    (sequence,), _ = whole_sequences([lent])
    held = [sequence.tokens.numpy(), sequence.aux.numpy(), sequence.last.numpy()]
    assert not any(np.shares_memory(ours, theirs) for ours in held for theirs in (lent.tokens, lent.states))


@pytest.mark.parametrize("cut", [(0, None), (5, 8)])
def test_ranks_that_have_other_tokens_and_layers_are_joined(cut):
    """Their real meshes are in tests/engine/test_hidden_state_ranks.py; `cut`: a window of the sequences."""
    sent = []
    for row, length in enumerate(LENGTHS):
        for layers in ((4,), (1, 2)):
            for stretches in ([(5, 7)], [(0, 5), (7, length)]):
                held = within(stretches, cut[0], cut[1] or length)
                sent.append(shard(row, [(cut[0] + a, cut[0] + b) for a, b in held], layers, *cut))
    joined, missing = whole_sequences(sent[::-1])
    assert (len(joined), missing) == (3, 0)
    for row, sequence in enumerate(joined):
        assert len(sequence) == (cut[1] or LENGTHS[row]) - cut[0]
        assert (sequence.start, sequence.prompt_len) == (cut[0], max(0, 4 - cut[0]))
        check(sequence, row)


@pytest.mark.parametrize(
    "shards",
    [
        [shard(0, [(0, 11)], (1, 2))],  # the last stage is missing
        [shard(0, [(0, 5)], WANTED)],  # the other slice is missing
        [shard(0, [(0, 11)], (1, 4)), shard(0, [(0, 5)], (2,))],
    ],
)
def test_a_sequence_with_a_missing_shard_is_left_out(shards):
    joined, missing = whole_sequences([*shards, shard(1, [(0, 8)], WANTED)])
    assert (len(joined), missing) == (1, 1)
    check(joined[0], 1)
