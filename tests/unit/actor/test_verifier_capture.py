"""What a weight sync costs each rank for the drafter: counted in bytes, with plain tensors in place of a policy's."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_tlt.actor import verifier_weights
from verl_tlt.actor.verifier_weights import VerifierCapture
from verl_tlt.drafter import from_numpy16

VOCABULARY, HIDDEN = 200, 16
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def policy(seed=0):
    """A policy's tensors in float32, in the order in which they stream."""
    torch.manual_seed(seed)
    shapes = {
        EMBED: (VOCABULARY, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (64, HIDDEN),
        "model.layers.0.self_attn.norm.weight": (HIDDEN,),
        NORM: (HIDDEN,),
        HEAD: (VOCABULARY, HIDDEN),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def stored(arrays):
    """As the object store does: a copy."""
    return {part: from_numpy16(getattr(arrays, part).copy()) for part in ("embed", "lm_head", "norm")}


def sync(capture, params):
    """A weight sync in which the rank streams `params`, which arrive as they are."""
    arrived = list(capture.tee(iter(params.items())))
    assert [name for name, _ in arrived] == list(params)
    assert all(tensor is params[name] for name, tensor in arrived), "the sync itself is as stock"
    capture.finish()


def synced(capture, params):
    """What was captured of a weight sync."""
    sync(capture, params)
    return capture.take()


class Crossing(TorchDispatchMode):
    """Notes what is copied into host memory from where the policy is: its types, and bytes in all."""

    def __init__(self):
        super().__init__()
        self.types, self.bytes = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.types.add(args[1].dtype)
            self.bytes += args[1].nbytes
        return function(*args, **(kwargs or {}))


def test_a_norm_that_adds_one_to_its_weight_arrives_as_what_it_multiplies_by():
    params = policy()
    arrived = synced(VerifierCapture(torch.float16, stored, norm_offset=1.0), params).reference
    torch.testing.assert_close(arrived["norm"], (1 + params[NORM]).half())
    torch.testing.assert_close(arrived["embed"], params[EMBED].half())


def test_what_crosses_has_sixteen_bits_and_lands_in_memory_that_is_kept():
    capture, places = VerifierCapture(torch.bfloat16, stored), []
    for seed in range(2):
        with Crossing() as crossing:
            found = synced(capture, policy(seed))
        assert (crossing.types, crossing.bytes) == ({torch.bfloat16}, 2 * (2 * VOCABULARY + 1) * HIDDEN)
        assert torch.equal(found.reference["lm_head"], policy(seed)[HEAD].bfloat16())
        places.append({part: tensor.data_ptr() for part, tensor in capture._host.items()})
    assert places[0] == places[1]
    assert capture.take().reference is None, "nothing is handed over twice"


@pytest.mark.parametrize("streams", [1, 2], ids=["once", "under both names"])
def test_tied_embeddings_cross_and_are_stored_once(streams):
    params = policy()
    del params[HEAD]
    if streams == 2:
        params[HEAD] = params[EMBED]
    with Crossing() as crossing:
        arrays = synced(VerifierCapture(torch.bfloat16, lambda arrays: arrays, tied=True), params).reference
    assert arrays.lm_head is arrays.embed and crossing.bytes == 2 * (VOCABULARY + 1) * HIDDEN


def test_the_sync_does_not_wait_for_the_object_store_and_the_next_one_overwrites_nothing_unread():
    read, kept = threading.Event(), []

    def slowly(arrays):
        assert read.wait(30)
        kept.append(stored(arrays))
        return len(kept)

    capture = VerifierCapture(torch.bfloat16, slowly)
    sync(capture, policy(seed=0))  # would not return
    second = threading.Thread(target=sync, args=(capture, policy(seed=1)))
    second.start()
    read.set()
    second.join(30)
    assert capture.take().reference == 2
    for seed, copy in enumerate(kept):
        assert torch.equal(copy["embed"], policy(seed)[EMBED].bfloat16())


def test_what_fails_costs_the_drafter_and_not_the_sync():
    def full(_arrays):
        raise MemoryError("the object store is full")

    capture = VerifierCapture(torch.bfloat16, full)
    for params in (policy(), policy() | {EMBED: "not a tensor"}):
        found = synced(capture, params)
        assert (found.reference, found.errors) == (None, 1)
    capture._put = stored
    found = synced(capture, policy())
    assert found.errors == 0 and found.seconds > 0
    assert torch.equal(found.reference["norm"], policy()[NORM].bfloat16())


def test_a_head_that_does_not_arrive_is_not_taken_to_be_the_embedding():
    capture, params = VerifierCapture(torch.bfloat16, stored), policy()
    params["lm_head.base_layer.weight"] = params.pop(HEAD)
    found = synced(capture, params)
    assert (found.reference, found.errors) == (None, 1)
    assert torch.equal(synced(capture, policy()).reference["lm_head"], policy()[HEAD].bfloat16())
    lora = synced(capture, {"model.layers.0.lora_A.weight": torch.ones(1)})
    assert lora.errors == 0, "a sync of adapters alone has none of the parts"


def test_an_object_store_that_hangs_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(verifier_weights, "PUT_S", 0.05)
    go_on = threading.Event()
    capture = VerifierCapture(torch.bfloat16, lambda _: go_on.wait(60))
    try:
        for syncs in (1, 2):  # asked for the copy, and about to make the next one
            for _ in range(syncs):
                sync(capture, policy())
            found = capture.take()
            assert found.reference is None and found.errors == 1
    finally:
        go_on.set()
