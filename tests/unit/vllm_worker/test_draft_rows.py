"""The kernels that replace rows on an accelerator, under Triton's interpreter."""

import pytest
import torch

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("width", [5, 4096, 4097, 9000])
def test_chosen_rows_are_emptied_and_no_other_is_touched(draft_rows, width):
    values = torch.rand(6, width)
    values[[1, 4]] = torch.nan
    sound = values.clone()
    draft_rows.empty_rows(values, values[:, 0].isnan())
    assert not values[[1, 4]].any()
    assert torch.equal(values[[0, 2, 3, 5]], sound[[0, 2, 3, 5]])


@pytest.mark.parametrize("width", [5, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_no_distribution_become_those_of_the_drafted_token(draft_rows, width, dtype):
    """NaN or infinity anywhere in a row, or nothing at all: a single number is enough, wherever it stands."""
    logits = torch.randn(6, 3, width).to(dtype)
    logits[0, 0, 1:] = -INF  # a pruned vocabulary has most tokens so
    logits[2, 0] = NAN
    logits[2, 1, width - 1] = NAN
    logits[5, 0, 2] = INF
    logits[5, 1] = -INF
    logits[5, 2] = NAN  # a step that was not drafted
    logits[4] = NAN  # a slot that is not in the batch
    before, slots = logits.clone(), torch.tensor([5, 0, 2], dtype=torch.int32)
    drafts = torch.tensor([[1, 0, 9], [3, 2, 9], [width - 1, 4, 9]])
    broken = draft_rows.make_certain(logits, slots, drafts[:, :2])
    assert broken.tolist() == [[1, 1], [0, 0], [1, 1]]
    for row, step in ((0, 0), (0, 1), (2, 0), (2, 1)):
        found = logits[slots[row], step].float()
        assert found.softmax(0)[drafts[row, step]] == 1.0 and found.exp().sum() == 1.0
        logits[slots[row], step] = before[slots[row], step]
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8)), "no other row is touched"
