"""The capture on verl's real FSDP2 engine: what it keeps is what the policy computes for each sequence alone."""

import gc
from types import SimpleNamespace

import pytest
import torch
from actor import build_actor, check_states, free_port, infer, make_batch, make_rows, plain_policy

from verl_tlt.actor.adapters import adapt
from verl_tlt.actor.hidden_states import ROW
from verl_tlt.drafter.held_out import digest_of
from verl_tlt.errors import DrafterError

pytestmark = pytest.mark.engine

ROWS = make_rows([(3, 21), (12, 4), (5, 40), (7, 1), (2, 33), (9, 16)])
TOLERANCE = dict(rtol=2**-8, atol=1e-3)  # bfloat16's rounding; batching changes float32 sums by less


@pytest.fixture(scope="module")
def policy():
    return plain_policy()


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "padded"])
def actor(request):
    """An actor per padding mode, in a process group of its own that ends with it."""
    yield build_actor(remove_padding=request.param, port=free_port())
    torch.distributed.destroy_process_group()
    gc.collect()


@pytest.mark.parametrize(
    ("max_tokens", "padded", "window"), [(48, False, 11), (48, True, 10_000), (1000, False, 10_000), (1000, True, 11)]
)
def test_every_row_holds_its_own_states(actor, policy, max_tokens, padded, window):
    """In row order, from many micro-batches or one, and at their true positions."""
    taken, _ = infer(actor, ROWS, max_tokens, window, padded=padded)
    check_states(taken, ROWS, policy, window, **TOLERANCE)
    assert any(s.start > 0 for s in taken) == (window == 11)


def test_a_capture_holds_nothing_once_it_was_taken(actor):
    assert infer(actor, ROWS)[0]
    actor.infer_batch(make_batch(ROWS, 60, compute_loss=False))
    assert actor.capture.take()
    assert not actor.capture.chosen and not actor.capture.take()


@pytest.mark.parametrize("window", [7, 10_000])
def test_what_tools_answered_is_told_apart(actor, window):
    def sampled(length):
        mask = torch.ones(length, dtype=torch.int64)
        mask[2:5] = mask[8:9] = 0
        return mask

    masks = [sampled(len(tokens) - prompt_len) for tokens, prompt_len in ROWS]
    taken, _ = infer(actor, ROWS, 48, window, masks=masks)
    assert len(taken) == len(ROWS)
    for sequence, (tokens, prompt_len), mask in zip(taken, ROWS, masks, strict=True):
        whole = torch.cat([torch.zeros(prompt_len, dtype=torch.int64), mask])
        turns = torch.zeros(len(tokens), dtype=torch.int64)
        for turn in sequence.turns:
            turns[sequence.start + turn.start : sequence.start + turn.stop] = 1
        stop = sequence.start + len(sequence)
        assert torch.equal(turns[sequence.start : stop], whole[sequence.start : stop])


@pytest.mark.parametrize("budget", [70, 20])
def test_rows_beyond_the_budget_are_left_out(actor, policy, budget):
    """And those of one row, where the budget is smaller than a window."""
    taken, _ = infer(actor, ROWS, window=40, budget=budget)
    assert 0 < len(taken) < len(ROWS) and sum(len(s) for s in taken) <= budget
    prompts = [s.prompt for s in taken]
    chosen = [(tokens, prompt_len) for tokens, prompt_len in ROWS if digest_of(tokens[:prompt_len]) in prompts]
    check_states(taken, chosen, policy, min(40, budget), **TOLERANCE)


def test_a_batch_that_the_capture_does_not_understand_costs_its_states_and_not_the_step(actor):
    taken, known = infer(actor, ROWS)
    strange, errors = make_batch(ROWS, 60, compute_loss=False), actor.capture.errors
    for key in ("responses", "response_mask"):
        strange.pop(key, None)
    assert taken and torch.equal(actor.infer_batch(strange)["log_probs"].values(), known)
    assert not actor.capture.take() and actor.capture.errors == errors + 1


def test_a_rank_whose_choice_failed_goes_on_with_the_rows_of_the_others(actor, monkeypatch):
    begin = actor.batches_seen
    infer(actor, ROWS, budget=20)
    wanted, _ = infer(actor, ROWS, budget=20)

    def fails_once():
        monkeypatch.undo()
        raise RuntimeError("no rank")

    actor.batches_seen, errors = begin, actor.capture.errors
    monkeypatch.setattr(actor.engine, "get_data_parallel_rank", fails_once)
    assert not infer(actor, ROWS, budget=20)[0] and actor.capture.errors == errors + 1
    found, _ = infer(actor, ROWS, budget=20)
    assert found and [(s.prompt, s.start) for s in found] == [(s.prompt, s.start) for s in wanted]


def test_log_probs_are_the_same_to_the_bit(actor):
    taken, captured_too = infer(actor, ROWS)
    capture, actor.capture = actor.capture, None
    without = actor.infer_batch(make_batch(ROWS, 60, compute_loss=False))["log_probs"].values()
    actor.capture = capture
    assert taken and not capture.take() and torch.equal(captured_too, without)


def test_the_reference_policy_of_a_lora_actor_is_not_captured(actor):
    assert len(infer(actor, ROWS, no_lora_adapter=False)[0]) == len(ROWS)
    actor.engine.disable_adapter = torch.no_grad  # the toy has no adapter to switch off
    try:
        assert not infer(actor, ROWS, no_lora_adapter=True)[0]
    finally:
        del actor.engine.disable_adapter


def test_a_training_forward_is_not_captured(actor):
    actor.set_loss_fn(lambda model_output, data, dp_group: (0 * model_output["log_probs"].values().mean(), {}))
    for train in (False, True):
        batch = make_batch(ROWS, 60, global_token_num=[len(t) for t, _ in ROWS])
        batch[ROW] = torch.arange(len(ROWS))
        actor.capture.arm({row: (0, 5) for row in range(len(ROWS))})
        if train:
            actor.train_batch(batch)
        else:
            with actor.engine.eval_mode():
                actor.engine.infer_batch(batch, loss_function=None)
        assert bool(actor.capture.take()) is not train


@pytest.mark.parametrize(
    ("strategy", "module", "why"),
    [
        ("veomni", torch.nn.Linear(2, 2), "strategy=veomni has no"),
        ("fsdp2", torch.nn.Linear(2, 2), "is a Linear, in which no modules hold a list of decoder layers"),
        ("megatron", [torch.nn.Linear(2, 2)], "is a Linear, without a decoder"),
    ],
)
def test_what_cannot_be_captured_says_so(strategy, module, why):
    engine = SimpleNamespace(engine_config=SimpleNamespace(strategy=strategy), module=module)
    with pytest.raises(DrafterError, match=why):
        adapt(engine)
