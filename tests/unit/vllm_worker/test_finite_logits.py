"""Whatever a drafter computes, vLLM gets logits that make a distribution at every temperature."""

from types import SimpleNamespace

import pytest
import torch

from verl_tlt.vllm_worker.finite_logits import keep_logits_finite

COLDEST = 0.01
"""vLLM's least temperature above 0."""
ROWS = [
    [0.5, -1.0, 2.0, float("-inf")],
    [float("nan")] * 4,
    [float("nan"), 1.0, 2.0, 3.0],
    [float("inf"), 1.0, float("inf"), float("-inf")],
    [float("-inf")] * 4,
    [6e4, -6e4, 6e4, 0.0],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, COLDEST])
def test_every_row_is_a_distribution_and_a_sound_one_is_left_as_it_is(dtype, temperature):
    rows = torch.tensor(ROWS, dtype=dtype)
    drafter = SimpleNamespace(compute_logits=lambda hidden: rows.clone())
    keep_logits_finite(drafter)
    probs = drafter.compute_logits(None).div_(temperature).softmax(-1, dtype=torch.float32)
    assert probs.isfinite().all() and probs.sum(-1).allclose(torch.ones(len(ROWS)))
    assert torch.equal(probs[0], rows[0].clone().div_(temperature).softmax(-1, dtype=torch.float32))
    assert probs[0, 3] == 0.0, "a token outside the draft vocabulary"
    assert torch.equal(probs[1], torch.full((4,), 0.25))
