"""What the capture chooses, and what it holds while the policy's forward runs: chosen tokens, never a layer's input."""

import gc
import random
import time
import weakref

import numpy as np
import pytest
import torch
from long_tail import long_tailed, share_by_decile

from verl_tlt.actor.adapters import TokenSpan
from verl_tlt.actor.chosen_sequences import capture_turns, choose_window, select_sequences, turn_budget
from verl_tlt.actor.hidden_states import ROW, HiddenStateCapture, _MicroBatch

WHOLE = 10**9
"""A window that cuts no sequence."""
HIDDEN, LENGTHS, RESPONSES = 32, (300, 500, 200), (100, 400, 50)
AUX, LAYERS = (1, 2, 4), 6


@pytest.mark.parametrize("budget", [1, 500, 8192, 10**9])
@pytest.mark.parametrize("window", [WHOLE, 64, 4096])
def test_the_budget_holds_and_something_is_always_chosen(budget, window):
    rng = random.Random(0)
    for _ in range(50):
        lengths = long_tailed(rng.randint(1, 80), rng)
        chosen = select_sequences(lengths, budget, rng, min(window, budget))
        assert chosen and chosen == sorted(set(chosen))
        assert sum(min(lengths[i], budget, window) for i in chosen) <= budget


@pytest.mark.parametrize(
    ("ranks", "tokens", "turns"),
    [(1, 65_536, 1), (16, 65_536, 1), (17, 65_536, 2), (64, 65_536, 4), (256, 65_536, 16), (8, 1000, 8), (8, 0, 1)],
)
def test_ranks_take_turns_so_that_each_captures_whole_windows(ranks, tokens, turns):
    assert capture_turns(tokens, ranks, 4096) == turns
    budget = tokens * turns // ranks
    assert budget >= min(4096, tokens)
    for rank in range(ranks):
        by_batch = [turn_budget(budget, turns, batch, rank) for batch in range(turns)]
        assert sorted(by_batch) == [0] * (turns - 1) + [budget], "each rank captures once in so many batches"


@pytest.mark.parametrize("window", [WHOLE, 1000])
def test_each_decile_is_captured_in_proportion_to_its_tokens(window):
    rng = random.Random(3)
    lengths = long_tailed(200, rng)
    captured, budget, draws = np.zeros(200), sum(lengths) // 8, 600
    for _ in range(draws):
        for i in select_sequences(lengths, budget, rng, min(window, budget)):
            captured[i] += min(lengths[i], window, budget)
    shares, fair = share_by_decile(lengths, captured), share_by_decile(lengths, lengths)
    assert np.all(captured > 0)
    assert shares[-1] == pytest.approx(fair[-1], rel=0.05)
    assert shares == pytest.approx(fair, rel=0.12)
    assert captured.sum() / draws > 0.85 * budget


def test_every_single_choice_spans_the_lengths():
    """Nine or ten of 100 evenly spaced lengths: the widest gap stays near the stride; blind draws leave twice that."""
    rng = random.Random(4)
    lengths = list(range(10, 1010, 10))

    def widest_gap(chosen):
        return max(np.diff([0, *sorted(lengths[i] for i in chosen), 1000]))

    budget = sum(lengths) // 10
    ours = [widest_gap(select_sequences(lengths, budget, rng, budget)) for _ in range(200)]
    blind = [widest_gap(rng.sample(range(100), 9)) for _ in range(200)]
    assert np.mean(ours) < 200 < np.mean(blind)


def test_a_window_holds_true_positions_of_the_response_and_prefers_the_tail():
    rng = random.Random(0)
    for _ in range(2000):
        length = rng.randint(2, 500)
        prompt_len, window = rng.randint(0, length - 1), rng.randint(1, 300)
        start, stop = choose_window(length, prompt_len, window, rng)
        assert 0 <= start < stop <= length and stop - start == min(length, window)
        assert start >= prompt_len or stop == length
    starts = np.array([choose_window(10_000, 100, 1000, rng)[0] for _ in range(4000)])
    assert 0.71 < (starts > (100 + 9000) / 2).mean() < 0.79  # the later of two uniform draws: 3/4
    assert starts.min() < 600 and starts.max() > 8900


class Packed:
    """An engine whose micro-batch is one packed row of float32 states [1, T, H], and a policy of six layers."""

    layers = LAYERS

    def __init__(self):
        torch.manual_seed(0)
        self.modules = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS + 1)]  # the last one is the norm

    def points(self):
        yield from enumerate(self.modules)

    def intercept(self, around):
        self.around = around

    def locate(self, state, lengths):
        begins = np.cumsum([0, *lengths])
        return [(state[0], [TokenSpan(0, n, int(begins[i]))]) for i, n in enumerate(lengths)]

    def forward(self, look=lambda layer, seen: None):
        """The states that went into each layer; `look(layer, seen)` is called while it runs, behind our hook."""
        inputs, seen, state = [], [], torch.randn(1, sum(LENGTHS), HIDDEN)
        with torch.no_grad():
            for layer, module in enumerate(self.modules):
                hook = module.register_forward_pre_hook(lambda _m, _args, layer=layer: look(layer, seen))
                seen.append(weakref.ref(state))
                inputs.append(state.clone())
                state = module(state)
                hook.remove()
        return inputs


def captured(windows):
    """An engine, its capture that is to record these windows, and a micro-batch."""
    engine = Packed()
    capture = HiddenStateCapture(engine, AUX, torch.bfloat16)
    capture.arm(windows)
    ids, responses = (
        torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
        for lengths in (LENGTHS, RESPONSES)
    )
    return engine, capture, {ROW: torch.tensor([10, 12, 11]), "input_ids": ids, "responses": responses}


def held(root):
    """Bytes of all tensors and arrays that can be reached from its own objects, each storage once."""
    storages, visited, waiting = {}, set(), list(vars(root).values())
    while waiting:
        found = waiting.pop()
        if id(found) in visited or isinstance(found, Packed | type):
            continue
        visited.add(id(found))
        if isinstance(found, torch.Tensor):
            found = found.values() if found.is_nested else found
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        elif isinstance(found, np.ndarray):
            storages[found.ctypes.data] = found.nbytes
        elif isinstance(found, dict | list | tuple) or type(found).__module__.startswith("verl_tlt."):
            waiting += gc.get_referents(found)
    return sum(storages.values())


def test_the_capture_holds_the_chosen_tokens_and_nothing_else():
    windows = {10: (250, 290), 11: (5, 65)}
    engine, capture, batch = captured(windows)
    measured = {}

    def look(layer, seen):
        measured[layer] = held(capture)
        assert all(ref() is None for ref in seen[:-1]), "an input outlives its layer"

    inputs = engine.around(batch, True, lambda: engine.forward(look))
    token = HIDDEN * 2
    for layer in range(LAYERS + 1):
        copied = sum(index <= layer for index in (*AUX, LAYERS))
        assert measured[layer] - measured[0] <= copied * 100 * token, f"before layer {layer}"  # first: the batch's ids
    first, second = capture.take()
    assert (first.row, second.row, capture.errors) == (10, 11, 0)
    for shard, begin in ((first, 0), (second, LENGTHS[0] + LENGTHS[1])):
        start, stop = windows[shard.row]
        wanted = torch.stack([inputs[layer][0, begin + start : begin + stop] for layer in (*AUX, LAYERS)])
        assert torch.equal(torch.from_numpy(shard.states).view(torch.bfloat16), wanted.bfloat16())


def test_the_forwards_time_is_not_the_captures(monkeypatch):
    """A GPU still computes when the forward returns, and the copy waits for it."""
    engine, capture, batch = captured({10: (0, 10)})
    monkeypatch.setattr(_MicroBatch, "synchronize", lambda _: time.sleep(0.5))
    engine.around(batch, True, engine.forward)
    assert capture.take() and 0 < capture.seconds < 0.5


def test_a_layer_that_cannot_be_located_costs_the_micro_batch_and_not_the_forward():
    engine, capture, batch = captured({10: (0, 10)})
    locate, calls = engine.locate, []

    def broken(state, lengths):
        calls.append(lengths)
        if len(calls) == 2:
            raise RuntimeError("another layout")
        return locate(state, lengths)

    engine.locate = broken
    assert len(engine.around(batch, True, engine.forward)) == LAYERS + 1
    assert (capture.errors, len(calls), capture.take()) == (1, 2, [])
