"""A drafter's time on a device: what is copied, what a stop waits for, and that nothing is lost on the way.

The "device" is other memory of the host, which shows all but speed.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from saved_bytes import kept_bytes, planned_bytes
from tiny_policy import drafter_of, same_state
from transformers import Qwen2Config

from verl_tlt.drafter import (
    DrafterMemory,
    DrafterTrainer,
    VerifierWeights,
    acceptance,
    build_drafter,
    drafter_config,
    halve_frozen,
    host_bytes,
    pack,
    refresh_verifier_weights,
    session_bytes,
    train,
)
from verl_tlt.drafter.build import instantiate
from verl_tlt.drafter.memory import ALIGNMENT, layout, views

AWAY = torch.device("cpu")
QWEN_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, vocab_size=152064, num_attention_heads=28, num_key_value_heads=4,
    num_hidden_layers=28, max_position_embeddings=32768, architectures=["Qwen2ForCausalLM"],
)  # fmt: skip


@pytest.fixture
def in_16_bits(monkeypatch):
    """Matrix products as on CUDA."""
    monkeypatch.setattr(train, "mixed_precision", lambda device: torch.autocast("cpu", torch.bfloat16))


@pytest.fixture
def trainer(drafter):
    halve_frozen(drafter)
    return DrafterTrainer(drafter, ttt_steps=3, warmup_steps=2)


@pytest.fixture
def memory(trainer):
    return DrafterMemory(trainer)


def homes(trainer):
    return [t.data_ptr() for t in (*trainer.model.parameters(), *trainer.model.buffers())]


def shares(tensor, named):
    """Whether it is one of these."""
    return any(tensor is value for value in named.values())


def moments(trainer):
    return [value for state in trainer.optimizer.state.values() for value in state.values()]


def test_tensors_lie_side_by_side_in_one_block():
    like = [torch.ones(3, 5), torch.ones(7, dtype=torch.bool), torch.tensor(2.0), torch.ones(64, 2).bfloat16()]
    begins, nbytes = layout([t.nbytes for t in like])
    assert begins == [0, 256, 512, 768] and nbytes == 1024 and layout([]) == ([], 0)
    block = torch.zeros(nbytes, dtype=torch.uint8)
    placed = views(block, like)
    for view, tensor in zip(placed, like, strict=True):
        view.copy_(tensor)
    assert all(torch.equal(view, tensor) for view, tensor in zip(placed, like, strict=True))
    assert len(views(block[:768], like)) == 3, "those behind the end are left out"


def test_all_of_a_drafter_moves_into_one_block_with_room_for_nothing_else(trainer):
    """One allocation, made before the first step: no power of two, and nothing that a session has still to lock."""
    before, at_home = trainer.state(), homes(trainer)
    memory = DrafterMemory(trainer)
    begin, end = memory.block.data_ptr(), memory.block.data_ptr() + memory.block.nbytes
    held = [*trainer.model.parameters(), *trainer.model.buffers(), *moments(trainer)]
    assert all(begin <= t.data_ptr() < end for t in held) and not set(homes(trainer)) & set(at_home)
    assert memory.block.nbytes < sum(t.nbytes for t in held) + ALIGNMENT * len(held)
    assert same_state(before, trainer.state())


def test_a_stop_moves_what_training_changed_and_nothing_else(in_16_bits, monkeypatch, trainer, sequences):
    memory, arrived = DrafterMemory(trainer), []

    def copy(target, source):
        target.copy_(source)
        arrived.append(target.nbytes)

    def copied():
        total = sum(arrived)
        arrived.clear()
        return total

    monkeypatch.setattr("verl_tlt.drafter.memory._copy", copy)
    changing = layout([t.nbytes for t in (*trainer.parameters.values(), *moments(trainer))])[1]
    optimizer = layout([t.nbytes for t in moments(trainer)])[1]
    at_home = homes(trainer)
    for _ in range(3):
        with memory.on(AWAY):
            assert copied() == memory.block.nbytes
            assert not set(homes(trainer)) & set(at_home), "something stayed behind"
            embedding = trainer.model.embed_tokens.weight
            assert embedding.dtype == torch.bfloat16 and next(iter(trainer.parameters.values())).dtype == torch.float32
            trainer.step(pack(sequences))
        assert copied() == changing
        assert homes(trainer) == at_home
    with memory.on(AWAY, trains=False):
        assert copied() == memory.block.nbytes - optimizer
        acceptance(trainer.model, sequences, max_draft=2)
    assert copied() == 0


def test_sessions_away_are_sessions_at_home_to_the_bit(policy, sequences):
    def trained(away):
        trainer = DrafterTrainer(drafter_of(policy, seed=3), ttt_steps=2)
        memory = DrafterMemory(trainer) if away else None
        for some in (sequences[:2], sequences[2:], sequences):
            with memory.on(AWAY) if away else nullcontext():
                trainer.step(pack(some))
        return trainer.state()

    assert same_state(trained(True), trained(False))


def test_a_resumed_optimizer_stays_in_the_block(in_16_bits, trainer, memory, sequences):
    with memory.on(AWAY):
        trainer.step(pack(sequences))
    saved, places = trainer.state(), [t.data_ptr() for t in moments(trainer)]
    trainer.start_over()
    assert not any(t.any() for t in moments(trainer) if not shares(t, trainer.averages())) and trainer.steps == 0
    trainer.load_state(saved)
    assert same_state(trainer.state(), saved) and [t.data_ptr() for t in moments(trainer)] == places


def test_sixteen_bit_verifier_weights_teach_the_same(in_16_bits, drafter, sequences):
    trainer = DrafterTrainer(drafter, ttt_steps=3)
    trainer.passes = 3
    plain = trainer._forward(trainer.feed()(pack(sequences)).arrived())[0]
    halve_frozen(drafter)
    with DrafterMemory(trainer).on(AWAY):
        result = trainer.step(pack(sequences))
    assert math.isfinite(result.loss) and not result.skipped
    assert result.loss == pytest.approx(float(plain), rel=0.02)


@pytest.mark.parametrize("where", ["inside", "on the way back"])
def test_a_session_that_fails_leaves_nothing_on_the_device(in_16_bits, monkeypatch, trainer, memory, sequences, where):
    at_home, before = homes(trainer), trainer.state()["parameters"]

    def copy(target, source):
        if where == "on the way back" and target.data_ptr() == memory.block.data_ptr() + memory.changing:
            raise RuntimeError("the device is lost")
        target.copy_(source)

    monkeypatch.setattr("verl_tlt.drafter.memory._copy", copy)
    with pytest.raises(RuntimeError), memory.on(AWAY):
        trainer.step(pack(sequences))
        trainer._forward(trainer.feed()(pack(sequences)).arrived())[0].backward()
        raise RuntimeError("out of memory")
    assert homes(trainer) == at_home
    assert all(p.grad is None for p in trainer.parameters.values())
    after = trainer.state()["parameters"]
    assert torch.equal(after["fc.weight"], before["fc.weight"]) == (where == "on the way back")


def test_a_rehearsal_teaches_nothing(in_16_bits, trainer):
    before = trainer.state()
    trainer.rehearse()
    assert same_state(before, trainer.state()) and (trainer.steps, trainer.skipped) == (0, 0)
    assert all(p.grad is None for p in trainer.parameters.values())


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(
    ("hidden", "mlp", "heads", "kv_heads", "rows"),
    [(256, 1024, 4, 4, 128), (512, 768, 8, 2, 256)],
    ids=["wide", "deep"],
)
def test_what_a_step_keeps_for_its_backward_pass_is_planned(hidden, mlp, heads, kv_heads, rows, passes):
    policy = Qwen2Config(
        hidden_size=hidden, intermediate_size=mlp, vocab_size=512, num_attention_heads=heads,
        num_key_value_heads=kv_heads, num_hidden_layers=8, max_position_embeddings=1024,
        architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    model = build_drafter(policy, attention="sdpa")  # as on CUDA
    weights = torch.zeros(512, hidden, dtype=torch.bfloat16)
    refresh_verifier_weights(model, VerifierWeights(weights, weights, torch.ones(hidden)))
    halve_frozen(model)
    kept, planned = kept_bytes(model, rows, passes), planned_bytes(model, rows, passes)
    assert kept <= planned <= 1.2 * kept


def test_what_a_7b_policys_drafter_needs():
    with torch.device("meta"):
        model = instantiate(drafter_config(QWEN_7B), "sdpa")
    whole = session_bytes(model, rows=1024, passes=3, scored=1024)
    assert whole == pytest.approx(13e9, rel=0.05)
    with torch.device("meta"):
        pruned = instantiate(drafter_config(QWEN_7B, draft_vocab_size=32_768), "sdpa")
    # Frozen and logits shrink, and four times as many rows take four times the activations; scores take the whole head.
    assert session_bytes(pruned, rows=4096, passes=3, scored=1024) == pytest.approx(15.5e9, rel=0.05)
    short, long = (session_bytes(pruned, rows=1024, passes=3, scored=scored) for scored in (1024, 8192))
    assert long - short > 8192 * 8 * 32_768 - 1024 * 20 * 32_768, "sequences are scored whole"
    assert host_bytes(model) == pytest.approx(10.2e9, rel=0.01)
    assert host_bytes(pruned) == pytest.approx(10.4e9, rel=0.01), "scores take the policy's whole head"
