"""Attention by document against dense attention under the library's own mask."""

import pytest
import torch
from tiny_policy import drafter_of
from torch.nn.functional import scaled_dot_product_attention

from verl_tlt.drafter import DrafterTrainer, pack
from verl_tlt.drafter.build import BY_DOCUMENT, attend_by_document

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def library_mask(documents, passes):
    from speculators.models.eagle3.attention import create_combined_mask_mod, extend_dense_mask_for_draft_tokens
    from torch.nn.attention.flex_attention import create_mask

    rows = len(documents)
    mask_mod = create_combined_mask_mod(torch.tensor(documents), rows)
    mask = create_mask(mask_mod, B=None, H=None, Q_LEN=rows, KV_LEN=rows, device="cpu")
    for _ in range(passes - 1):
        mask = extend_dense_mask_for_draft_tokens(mask, rows)
    return mask


def inputs(rows, passes):
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, rows), (KV_HEADS, rows * passes), (KV_HEADS, rows * passes)
    return [torch.randn(1, *shape, WIDTH, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("documents", [[0] * 5, [0, 0, 0, 1, 2, 2], [0, 0, -1, -1, -1], [0, 1, 2], [0, 0, 1, -1, 2, 2]])
@pytest.mark.parametrize("passes", [1, 3])
def test_it_is_dense_attention_and_so_are_its_gradients(documents, passes):
    mask = library_mask(documents, passes)
    direction = torch.randn(1, len(documents), HEADS, WIDTH)
    results = []
    for by_document in (True, False):
        q, k, v = inputs(len(documents), passes)
        if by_document:
            out, weights = attend_by_document(torch.nn.Module(), q, k, v, mask)
            assert weights is None
        else:
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        (out * direction).sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense)


def test_a_mask_that_is_not_causal_within_documents_is_refused():
    mask = library_mask([0, 0, 0, 0], 1)
    mask[0, 0, 3, 0] = False  # a sliding window of three
    mask[0, 0, 2, 1] = False
    with pytest.raises(ValueError, match=BY_DOCUMENT):
        attend_by_document(torch.nn.Module(), *inputs(4, 1), mask)


def test_a_training_step_is_that_of_the_dense_mask(policy, sequences):
    steps = []
    for attention in (None, "sdpa"):
        model = drafter_of(policy, seed=3, attention=attention)
        assert model._attn_impl == (attention or BY_DOCUMENT)
        trainer = DrafterTrainer(model, ttt_steps=3)
        steps.append((trainer.step(pack(sequences)), trainer.parameters_numpy()))
    (ours, weights), (dense, theirs) = steps
    assert ours.loss == pytest.approx(dense.loss, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(torch.from_numpy(value), torch.from_numpy(theirs[name]), rtol=1e-3, atol=1e-5)
