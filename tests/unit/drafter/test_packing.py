"""Which texts share a batch, which of their rows are learned from, and where a long text is cut."""

import itertools

import pytest

from verl_tlt.drafter import TrainingSequence, align, batches, pack, windows
from verl_tlt.drafter.data import grouped


def sizes(groups):
    return [list(group) for group in groups]


def test_items_go_into_the_first_open_group_that_has_room():
    items = [5, 6, 3, 2, 4]
    assert sizes(grouped(items, int, 8)) == [[5], [6], [3, 2], [4]]
    assert sizes(grouped(items, int, 8, open_groups=2)) == [[5, 3], [6, 2], [4]]
    assert sizes(grouped([9, 1, 9], int, 8)) == [[9], [1], [9]], "one above the budget is alone"
    assert sizes(grouped([1, 3, 4, 4], int, 8, padded=True)) == [[1, 3], [4, 4]], "1, 3 and 4 padded to 4 make 12"
    assert sizes(grouped([], int, 8)) == []


def test_an_endless_stream_is_grouped_as_it_comes():
    groups = grouped(itertools.cycle([3, 4]), int, 8, open_groups=3)
    assert [next(groups) for _ in range(2)] == [[3, 4], [3, 4]]


def test_long_sequences_are_cut_and_no_row_is_lost(sequences):
    longest = sequences[3]  # 30 tokens
    pieces = windows(longest, 8)
    assert [p.rows for p in pieces] == [7, 7, 7, 8]
    rows = [(t, int(x)) for p in pieces for t, x in enumerate(p.tokens[1:], p.start + 1)]
    assert rows == list(enumerate(longest.tokens[1:].tolist(), 1))
    assert windows(longest.window(0, 1), 8) == []
    packed = list(batches(sequences, 8))
    assert all(b.rows <= 8 for b in packed) and sum(b.rows for b in packed) == sum(s.rows for s in sequences)


def test_the_loss_falls_on_responses_whose_next_tokens_are_recorded(sequences):
    longest = sequences[3]  # 30 tokens, 3 of them prompt
    assert longest.loss_rows() == range(2, 28)
    assert longest.loss_rows(draft=3) == range(2, 26)
    assert align(longest).loss_mask[0].nonzero()[:, 0].tolist() == list(longest.loss_rows())
    assert not longest.window(0, 4).loss_rows() and not longest.window(0, 3).loss_rows()
    assert longest.window(10, 13).loss_rows() == range(0, 1)


def test_what_cannot_be_packed_is_refused(sequences):
    whole = sequences[3]
    with pytest.raises(ValueError, match="no sequence"):
        pack([])
    with pytest.raises(ValueError, match="at least 2"):
        pack([whole.window(0, 1)])
    with pytest.raises(ValueError, match="4 aux"):
        TrainingSequence(whole.tokens, 3, whole.aux[:4], whole.last)
