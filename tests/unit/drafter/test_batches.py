"""What the drafter is fed and scored on, against a naive reference; batches, and attention within documents."""

import itertools
from dataclasses import replace

import pytest
import torch
from tiny_policy import verifier_weights
from torch.nn.functional import scaled_dot_product_attention
from vllm_by_hand import Reference, passes

from verl_tlt.drafter.build import BY_DOCUMENT, attend_by_document, drafter_config, instantiate
from verl_tlt.drafter.data import align, batches, grouped, pack, windows
from verl_tlt.drafter.evaluate import acceptance
from verl_tlt.drafter.train import DrafterTrainer
from verl_tlt.drafter.verifier import refresh_verifier_weights

PASSES = 3
HEADS, KV_HEADS, WIDTH = 4, 2, 8


@pytest.mark.parametrize("norms", [(), ("norm_output",), ("fc_norm", "norm_output"), ("norm_before_fc",)])
def test_every_pass_is_what_vllm_computes_at_that_draft_position(policy, sequences, norms):
    """With some of the newer norms, none of them ones."""
    config = drafter_config(policy.config)
    for norm in norms:
        setattr(config, norm, True)
    drafter = instantiate(config, BY_DOCUMENT)
    refresh_verifier_weights(drafter, verifier_weights(policy))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.mul_(6 if parameter.ndim == 2 else 0.5 + torch.rand(parameter.shape))
    reference = Reference(drafter)
    for sequence in sequences[:2]:
        seen = passes(drafter, align(sequence))
        for t in range(len(sequence) - 1 - PASSES):
            drafted = reference.draft(sequence, t, PASSES)
            for k in range(PASSES):
                logits, targets = seen[k]
                torch.testing.assert_close(logits[t], drafted[k], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(targets[t], reference.policy(sequence, t + 1 + k), rtol=1e-4, atol=1e-4)


def test_a_window_keeps_true_positions_and_its_share_of_the_prompt(sequences):
    sequence = sequences[1]  # 25 tokens, 9 of them prompt
    window = sequence.window(4, 20)
    assert (len(window), window.prompt_len, window.start) == (16, 5, 4)
    assert sequence.window(12, 20).prompt_len == 0
    whole, part = align(sequence), align(window)
    assert part.position_ids[0, 0] == 4
    assert torch.equal(part.input_ids[0], whole.input_ids[0, 4:19])
    assert torch.equal(part.loss_mask[0, :-1], whole.loss_mask[0, 4:18])
    assert sequence.loss_rows(draft=3) == [range(8, 21)] and sequence.window(10, 13).loss_rows() == [range(1)]
    assert not sequence.window(0, 10).loss_rows() and not sequence.window(0, 9).loss_rows()


def test_what_the_policy_did_not_sample_is_neither_learned_nor_judged(drafter, policy, sequences):
    """A tool's answer stands in the response, as verl records it; vLLM is given it as a part of the next prompt."""
    sequence = replace(sequences[1], foreign=((13, 17), (23, 24)))  # 25 tokens, 9 of them prompt
    sampled, whole = [*range(9, 13), *range(17, 23), 24], align(sequence)
    assert whole.loss_mask[0].tolist() == [t + 1 in sampled and t + 2 in sampled for t in range(24)]
    assert torch.equal(whole.next_ids[0, :-1], sequence.tokens[2:])
    window = sequence.window(15, 24)
    assert window.foreign == ((0, 2), (8, 9)) and window.turns == [range(2, 8)]
    assert torch.equal(align(window).loss_mask[0, :-1], whole.loss_mask[0, 15:22])
    refresh_verifier_weights(drafter, verifier_weights(policy))
    (score,) = acceptance(drafter, [sequence], max_draft=2)
    turns = [replace(sequences[1], prompt_len=a).window(0, b) for a, b in ((9, 13), (17, 23))]  # with what is before
    alone = acceptance(drafter, turns, max_draft=2)
    assert score.positions == sum(one.positions for one in alone) == 2 + 4
    assert score.drafts == pytest.approx(sum(one.drafts for one in alone))
    assert score.accepted == pytest.approx(sum(one.accepted for one in alone))


def test_packed_and_padded_equals_one_by_one_in_loss_and_gradient(drafter, sequences):
    trainer = DrafterTrainer(drafter, ttt_steps=PASSES)
    # A window that begins within the response has no prompt to keep later passes off the document before it.
    sequences = [*sequences, sequences[1].window(12, 24), sequences[3].window(2, 20)]

    def loss_and_gradients(batch):
        fed = trainer.feed()(batch)
        loss, _ = trainer._forward(fed.arrived())
        gradients = torch.autograd.grad(loss, list(trainer.parameters.values()))
        return fed.tokens, loss.detach(), gradients

    alone = [loss_and_gradients(align(s)) for s in sequences]
    packed = pack(sequences).padded(64)
    assert packed.rows == 128
    rows, loss, gradients = loss_and_gradients(packed)
    assert rows == sum(n for n, _, _ in alone)
    torch.testing.assert_close(loss, sum(n * x for n, x, _ in alone) / rows, rtol=1e-4, atol=1e-6)
    for i, gradient in enumerate(gradients):
        expected = sum(n * g[i] for n, _, g in alone) / rows
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_items_go_into_the_first_open_group_that_has_room():
    items = [5, 6, 3, 2, 4]
    assert list(grouped(items, int, 8)) == [[5], [6], [3, 2], [4]]
    assert list(grouped(items, int, 8, open_groups=2)) == [[5, 3], [6, 2], [4]]
    assert list(grouped([9, 1, 9], int, 8)) == [[9], [1], [9]], "one above the budget is alone"
    assert list(grouped([1, 3, 4, 4], int, 8, padded=True)) == [[1, 3], [4, 4]], "1, 3 and 4 padded to 4 make 12"
    assert list(grouped([], int, 8)) == []
    endless = grouped(itertools.cycle([3, 4]), int, 8, open_groups=3)
    assert [next(endless) for _ in range(2)] == [[3, 4], [3, 4]]


def test_long_sequences_are_cut_and_no_row_is_lost(sequences):
    longest = sequences[3]  # 30 tokens
    assert [piece.rows for piece in windows(longest, 8)] == [7, 7, 7, 8]
    assert windows(longest.window(0, 1), 8) == []
    packed = list(batches(sequences, 8))
    assert all(b.rows <= 8 for b in packed) and sum(b.rows for b in packed) == sum(s.rows for s in sequences)


def library_mask(documents, passes):
    from speculators.models.eagle3.attention import create_combined_mask_mod, extend_dense_mask_for_draft_tokens
    from torch.nn.attention.flex_attention import create_mask

    rows = len(documents)
    mask_mod = create_combined_mask_mod(torch.tensor(documents), rows)
    mask = create_mask(mask_mod, B=None, H=None, Q_LEN=rows, KV_LEN=rows, device="cpu")
    for _ in range(passes - 1):
        mask = extend_dense_mask_for_draft_tokens(mask, rows)
    return mask


def attention_inputs(rows, passes):
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, rows), (KV_HEADS, rows * passes), (KV_HEADS, rows * passes)
    return [torch.randn(1, *shape, WIDTH, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("documents", [[0] * 5, [0, 0, 0, 1, 2, 2], [0, 0, -1, -1, -1], [0, 1, 2], [0, 0, 1, -1, 2, 2]])
@pytest.mark.parametrize("passes", [1, 3])
def test_by_document_it_is_dense_attention_and_so_are_its_gradients(documents, passes):
    mask = library_mask(documents, passes)
    direction = torch.randn(1, len(documents), HEADS, WIDTH)
    results = []
    for by_document in (True, False):
        q, k, v = attention_inputs(len(documents), passes)
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
    mask[0, 0, 3, 0] = mask[0, 0, 2, 1] = False  # a sliding window of three
    with pytest.raises(ValueError, match=BY_DOCUMENT):
        attend_by_document(torch.nn.Module(), *attention_inputs(4, 1), mask)
