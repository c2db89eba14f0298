"""What the tap holds while the policy's forward runs: the chosen tokens in 16 bits, never a layer's whole input."""

import gc
import weakref

import numpy as np
import pytest
import torch

from verl_tlt.actor.adapters import TokenSpan
from verl_tlt.actor.tap import ROW, HiddenStateTap

HIDDEN, LENGTHS, RESPONSES = 32, (300, 500, 200), (100, 400, 50)
AUX, LAYERS = (1, 2, 4), 6


class Packed:
    """An engine whose micro-batch is one packed row of float32 states [1, T, H], and a policy of six layers."""

    layers = LAYERS

    def __init__(self):
        self.modules = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS + 1)]  # the last one is the norm

    def points(self):
        yield from enumerate(self.modules)

    def intercept(self, around):
        self.around = around

    def locate(self, state, lengths):
        begins = np.cumsum([0, *lengths])
        return [(state[0], [TokenSpan(0, n, int(begins[i]))]) for i, n in enumerate(lengths)]

    def forward(self, state, look):
        """The states that went into each layer; `look(layer)` is called while it runs, behind the tap's hook."""
        inputs, seen = [], []
        with torch.no_grad():
            for layer, module in enumerate(self.modules):
                hook = module.register_forward_pre_hook(lambda _m, _args, layer=layer: look(layer, seen))
                seen.append(weakref.ref(state))
                inputs.append(state.clone())
                state = module(state)
                hook.remove()
        return inputs


def held(root):
    """Bytes of all tensors and arrays that can be reached from the tap's own objects, each storage once."""
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


def jagged(lengths):
    return torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


@pytest.fixture
def engine():
    torch.manual_seed(0)
    return Packed()


def test_the_tap_holds_the_chosen_tokens_and_nothing_else(engine):
    tap = HiddenStateTap(engine, AUX, torch.bfloat16)
    windows = {10: (250, 290), 11: (5, 65)}
    tap.arm(windows)
    batch = {ROW: torch.tensor([10, 12, 11]), "input_ids": jagged(LENGTHS), "responses": jagged(RESPONSES)}
    measured = {}

    def look(layer, seen):
        measured[layer] = held(tap)
        assert all(ref() is None for ref in seen[:-1]), "an input outlives its layer"

    inputs = engine.around(batch, True, lambda: engine.forward(torch.randn(1, sum(LENGTHS), HIDDEN), look))
    token = HIDDEN * 2
    layers_so_far = [sum(index <= layer for index in (*AUX, LAYERS)) for layer in range(LAYERS + 1)]
    for layer, count in enumerate(layers_so_far):
        assert measured[layer] - measured[0] <= count * 100 * token, f"before layer {layer}"  # first: the batch's ids
    assert 100 * len((*AUX, LAYERS)) * token * 10 < sum(LENGTHS) * HIDDEN * 4 * len((*AUX, LAYERS)), "far below whole"
    first, second = tap.take()
    assert (first.row, second.row, tap.errors) == (10, 11, 0)
    for shard, begin in ((first, 0), (second, LENGTHS[0] + LENGTHS[1])):
        start, stop = windows[shard.row]
        wanted = torch.stack([inputs[layer][0, begin + start : begin + stop] for layer in (*AUX, LAYERS)])
        assert torch.equal(torch.from_numpy(shard.states).view(torch.bfloat16), wanted.bfloat16())


def test_a_layer_that_cannot_be_located_costs_the_micro_batch_and_not_the_forward(engine):
    tap = HiddenStateTap(engine, AUX, torch.bfloat16)
    tap.arm({0: (0, 10)})
    locate, calls = engine.locate, []

    def broken(state, lengths):
        calls.append(lengths)
        if len(calls) == 2:
            raise RuntimeError("another layout")
        return locate(state, lengths)

    engine.locate = broken
    batch = {ROW: torch.tensor([0, 1, 2]), "input_ids": jagged(LENGTHS), "responses": jagged(RESPONSES)}
    output = engine.around(batch, True, lambda: engine.forward(torch.randn(1, sum(LENGTHS), HIDDEN), lambda *_: None))
    assert len(output) == LAYERS + 1
    assert (tap.errors, len(calls), tap.take()) == (1, 2, [])
