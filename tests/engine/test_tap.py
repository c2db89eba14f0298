"""The tap on verl's real FSDP2 engine: what it keeps is what the policy computes for each sequence alone."""

import gc
from types import SimpleNamespace

import pytest
import torch
from actor import build_actor, check_states, free_port, make_batch, make_rows, whole_sequences

from demo.toy.assets import SHIPPED_POLICY
from verl_tlt.actor.adapters import adapt
from verl_tlt.errors import DrafterError

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


def infer(actor, batch):
    from verl.utils import tensordict_utils as tu

    return tu.get(actor.infer_batch(batch), "log_probs").values()  # [sum L_b]


@pytest.mark.parametrize("max_tokens", [48, 1000], ids=["many micro-batches", "one micro-batch"])
@pytest.mark.parametrize("padded", [False, True], ids=["responses", "mask"])
@pytest.mark.parametrize("window", [10_000, 11])
def test_every_row_holds_its_own_states(actor, policy, max_tokens, padded, window):
    """In row order, whatever order they were computed in, and at their true positions."""
    rows = make_rows(LENGTHS)
    actor.tap_budget, actor.tap_window = 10_000, window
    infer(actor, make_batch(rows, max_tokens, padded, compute_loss=False))
    taken = whole_sequences([actor.tap.take()])
    check_states(taken, rows, policy, window, **TOLERANCE)
    assert any(s.start > 0 for s in taken) == (window == 11)


def test_rows_beyond_the_budget_are_left_out(actor, policy):
    rows = make_rows(LENGTHS, seed=2)
    actor.tap_budget, actor.tap_window = 70, 40
    infer(actor, make_batch(rows, 60, compute_loss=False))
    chosen = sorted(actor.tap.chosen)
    taken = whole_sequences([actor.tap.take()])
    assert 0 < len(taken) < len(rows)
    assert sum(len(s) for s in taken) <= 70
    check_states(taken, [rows[row] for row in chosen], policy, 40, **TOLERANCE)


def test_a_batch_that_the_tap_does_not_understand_costs_its_states_and_not_the_step(actor):
    rows = make_rows(LENGTHS, seed=3)
    actor.tap_budget = actor.tap_window = 10_000
    batch = make_batch(rows, 60, compute_loss=False)
    known = infer(actor, batch)
    assert actor.tap.take()
    strange, errors = make_batch(rows, 60, compute_loss=False), actor.tap.errors
    for key in ("responses", "response_mask"):
        strange.pop(key, None)
    assert torch.equal(infer(actor, strange), known)
    assert not actor.tap.take() and actor.tap.errors == errors + 1


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


@pytest.mark.parametrize(
    ("strategy", "why"),
    [("veomni", "strategy=veomni has no"), ("fsdp2", "is a Linear, in which no modules hold a list of decoder layers")],
)
def test_what_cannot_be_tapped_says_so(strategy, why):
    engine = SimpleNamespace(engine_config=SimpleNamespace(strategy=strategy), module=torch.nn.Linear(2, 2))
    with pytest.raises(DrafterError, match=why):
        adapt(engine)
