"""The tap on verl's real FSDP2 engine: what it keeps is what the policy computes for each sequence alone."""

import gc
from types import SimpleNamespace

import pytest
import torch
from actor import build_actor, free_port, make_batch, make_rows, reference, whole_sequences

from demo.toy.assets import SHIPPED_POLICY
from verl_tlt.actor.adapters import Untapped, adapt

pytestmark = pytest.mark.engine

LENGTHS = [(3, 21), (12, 4), (5, 40), (7, 1), (2, 33), (9, 16)]
TOLERANCE = dict(rtol=2**-8, atol=1e-3)  # bfloat16's rounding; batching changes float32 sums by less


@pytest.fixture(scope="module")
def policy():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SHIPPED_POLICY, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "padded"])
def actor(request):
    """An actor per padding mode, in a process group of its own that ends with it."""
    yield build_actor(remove_padding=request.param, port=free_port())
    torch.distributed.destroy_process_group()
    gc.collect()


def check(taken, policy, tokens, prompt_len, start, stop):
    aux, last = reference(policy, tokens)
    assert (taken.start, taken.prompt_len) == (start, max(0, prompt_len - start))
    assert torch.equal(taken.tokens, tokens[start:stop])
    assert taken.aux.dtype == taken.last.dtype == torch.bfloat16
    torch.testing.assert_close(taken.aux.float(), aux[start:stop], **TOLERANCE)
    torch.testing.assert_close(taken.last.float(), last[start:stop], **TOLERANCE)


def infer(actor, batch):
    from verl.utils import tensordict_utils as tu

    return tu.get(actor.infer_batch(batch), "log_probs").values()  # [sum L_b]


@pytest.mark.parametrize("max_tokens", [48, 1000], ids=["many micro-batches", "one micro-batch"])
@pytest.mark.parametrize("padded", [False, True], ids=["responses", "mask"])
def test_every_row_holds_its_own_states(actor, policy, max_tokens, padded):
    rows = make_rows(LENGTHS)
    actor.tap_budget = actor.tap_window = 10_000
    infer(actor, make_batch(rows, max_tokens, padded, compute_loss=False))
    taken = whole_sequences([actor.tap.take()])
    assert len(taken) == len(rows)
    for s, (tokens, prompt_len) in zip(taken, rows, strict=True):  # row order, whatever order they were computed in
        check(s, policy, tokens, prompt_len, 0, len(tokens))


def test_a_window_keeps_its_true_positions(actor, policy):
    rows = make_rows(LENGTHS, seed=1)
    actor.tap_budget, actor.tap_window = 10_000, 11
    infer(actor, make_batch(rows, 60, compute_loss=False))
    taken = whole_sequences([actor.tap.take()])
    assert len(taken) == len(rows)
    assert any(s.start > 0 for s in taken)
    for s, (tokens, prompt_len) in zip(taken, rows, strict=True):
        assert len(s) == min(11, len(tokens))
        check(s, policy, tokens, prompt_len, s.start, s.start + len(s))


def test_rows_beyond_the_budget_are_left_out(actor, policy):
    rows = make_rows(LENGTHS, seed=2)
    actor.tap_budget, actor.tap_window = 70, 40
    batch = make_batch(rows, 60, compute_loss=False)
    infer(actor, batch)
    chosen = sorted(actor.tap.chosen)
    taken = whole_sequences([actor.tap.take()])
    assert 0 < len(taken) < len(rows)
    assert sum(len(s) for s in taken) <= 70
    for row, s in zip(chosen, taken, strict=True):
        check(s, policy, *rows[row], s.start, s.start + len(s))


def test_log_probs_are_the_same_to_the_bit(actor):
    rows = make_rows(LENGTHS, seed=3)
    actor.tap_budget = actor.tap_window = 10_000
    with_tap = infer(actor, make_batch(rows, 60, compute_loss=False))
    assert actor.tap.take()
    tap, actor.tap = actor.tap, None
    without = infer(actor, make_batch(rows, 60, compute_loss=False))
    actor.tap = tap
    assert not tap.take()
    assert torch.equal(with_tap, without)


def test_the_reference_policy_of_a_lora_actor_is_not_tapped(actor):
    rows = make_rows(LENGTHS)
    actor.tap_budget = actor.tap_window = 10_000
    infer(actor, make_batch(rows, 60, compute_loss=False, no_lora_adapter=False))
    assert len(actor.tap.take()) == len(rows)
    actor.engine.disable_adapter = torch.no_grad  # the toy has no adapter to switch off
    try:
        infer(actor, make_batch(rows, 60, compute_loss=False, no_lora_adapter=True))
    finally:
        del actor.engine.disable_adapter
    assert not actor.tap.take()


def test_a_training_forward_is_not_tapped(actor):
    from verl_tlt.actor.tap import ROW

    rows = make_rows(LENGTHS)
    actor.set_loss_fn(lambda model_output, data, dp_group: (0 * model_output["log_probs"].values().mean(), {}))
    for train in (False, True):
        batch = make_batch(rows, 60, global_token_num=[len(t) for t, _ in rows])
        batch[ROW] = torch.arange(len(rows))
        actor.tap.arm({row: (0, 5) for row in range(len(rows))})
        if train:
            actor.train_batch(batch)
        else:
            with actor.engine.eval_mode():
                actor.engine.infer_batch(batch, loss_function=None)
        assert bool(actor.tap.take()) is not train


def test_an_engine_without_a_tap_says_so():
    engine = SimpleNamespace(engine_config=SimpleNamespace(strategy="veomni"))
    with pytest.raises(Untapped, match="strategy=veomni has no"):
        adapt(engine)


def test_a_model_of_another_shape_says_so():
    engine = SimpleNamespace(engine_config=SimpleNamespace(strategy="fsdp2"), module=torch.nn.Linear(2, 2))
    with pytest.raises(Untapped, match=r"is a Linear, in which no modules hold a list of decoder layers"):
        adapt(engine)
