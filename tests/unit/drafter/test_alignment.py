"""What the drafter is fed and scored on, against the naive reference and the policy itself; texts in batches."""

import itertools

import pytest
import torch
from tiny_policy import FAMILIES, VOCAB, drafter_of, make_policy, observe, verifier_weights
from vllm_by_hand import Reference, passes

from verl_tlt.drafter import DrafterTrainer, align, batches, drafter_config, pack, refresh_verifier_weights, windows
from verl_tlt.drafter.build import instantiate
from verl_tlt.drafter.data import grouped

PASSES = 3


@pytest.fixture(params=[(), ("norm_output",), ("fc_norm", "norm_output"), ("norm_before_fc",)])
def normed(request, policy):
    """A drafter with some of the newer norms, none of them ones."""
    config = drafter_config(policy.config)
    for norm in request.param:
        setattr(config, norm, True)
    model = instantiate(config, "tlt_by_document")
    refresh_verifier_weights(model, verifier_weights(policy))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(6 if parameter.ndim == 2 else 0.5 + torch.rand(parameter.shape))
    return model


def test_every_pass_is_what_vllm_computes_at_that_draft_position(normed, sequences):
    drafter, reference = normed, Reference(normed)
    for sequence in sequences[:2]:
        seen = passes(drafter, align(sequence))
        for t in range(len(sequence) - 1 - PASSES):
            drafted = reference.draft(sequence, t, PASSES)
            for k in range(PASSES):
                logits, targets = seen[k]
                torch.testing.assert_close(logits[t], drafted[k], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(targets[t], reference.policy(sequence, t + 1 + k), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_aux_layers_are_layer_inputs_and_last_is_before_the_norm(family):
    policy = make_policy(family)
    tokens = torch.arange(12) % VOCAB
    sequence = observe(policy, tokens, 3, layers=(1, 2, 3))
    out = policy(tokens[None], output_hidden_states=True)
    # transformers: hidden_states[i] is the input of layer i; the last entry is *after* the final norm.
    torch.testing.assert_close(sequence.aux, torch.cat([out.hidden_states[i][0] for i in (1, 2, 3)], -1))
    assert not torch.allclose(sequence.last, out.hidden_states[-1][0], atol=1e-3)
    _, targets = passes(drafter_of(policy, aux_layers=(1, 2, 3)), align(sequence), 1)[0]
    torch.testing.assert_close(targets, out.logits[0, 1:], rtol=1e-4, atol=1e-4)


def test_loss_only_where_vllm_drafts(sequences):
    sequence = sequences[0]
    batch = align(sequence)
    length, prompt = len(sequence), sequence.prompt_len
    assert batch.rows == length - 1
    for row in range(batch.rows):
        assert batch.input_ids[0, row] == sequence.tokens[row + 1]
        known = prompt <= row + 1 and row + 2 < length
        assert bool(batch.loss_mask[0, row]) == known
        if known:
            assert batch.next_ids[0, row] == sequence.tokens[row + 2]
    assert batch.position_ids[0].tolist() == list(range(length - 1))


def test_a_window_keeps_true_positions_and_its_share_of_the_prompt(sequences):
    sequence = sequences[1]  # 25 tokens, 9 of them prompt
    window = sequence.window(4, 20)
    assert (len(window), window.prompt_len, window.start) == (16, 5, 4)
    assert align(window).position_ids[0, 0] == 4
    assert sequence.window(12, 20).prompt_len == 0
    whole, part = align(sequence), align(window)
    assert torch.equal(part.input_ids[0], whole.input_ids[0, 4:19])
    assert torch.equal(part.loss_mask[0, :-1], whole.loss_mask[0, 4:18])


def test_packed_equals_one_by_one_in_loss_and_gradient(policy, drafter, sequences):
    trainer = DrafterTrainer(drafter, ttt_steps=PASSES)
    # A window that begins within the response has no prompt to keep later passes off the document before it.
    sequences = [*sequences, sequences[1].window(12, 24), sequences[3].window(2, 20)]

    def loss_and_gradients(batch):
        fed = trainer.feed()(batch)
        loss, _ = trainer._forward(fed.arrived())
        gradients = torch.autograd.grad(loss, list(trainer.parameters.values()))
        return fed.tokens, loss.detach(), gradients

    alone = [loss_and_gradients(align(s)) for s in sequences]
    rows, loss, gradients = loss_and_gradients(pack(sequences))
    assert rows == sum(n for n, _, _ in alone)
    torch.testing.assert_close(loss, sum(n * x for n, x, _ in alone) / rows, rtol=1e-4, atol=1e-6)
    for i, gradient in enumerate(gradients):
        expected = sum(n * g[i] for n, _, g in alone) / rows
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_padding_rows_change_nothing(drafter, sequences):
    trainer = DrafterTrainer(drafter, ttt_steps=2)
    bare = pack(sequences[:2])
    loss, _ = trainer._forward(trainer.feed()(bare).arrived())
    filled, _ = trainer._forward(trainer.feed()(bare.padded(64)).arrived())
    torch.testing.assert_close(filled, loss)


def test_items_go_into_the_first_open_group_that_has_room():
    items = [5, 6, 3, 2, 4]
    assert list(grouped(items, int, 8)) == [[5], [6], [3, 2], [4]]
    assert list(grouped(items, int, 8, open_groups=2)) == [[5, 3], [6, 2], [4]]
    assert list(grouped([9, 1, 9], int, 8)) == [[9], [1], [9]], "one above the budget is alone"
    assert list(grouped([1, 3, 4, 4], int, 8, padded=True)) == [[1, 3], [4, 4]], "1, 3 and 4 padded to 4 make 12"
    assert list(grouped([], int, 8)) == []


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
    assert not longest.window(0, 4).loss_rows() and not longest.window(0, 3).loss_rows()
    assert longest.window(10, 13).loss_rows() == range(0, 1)
