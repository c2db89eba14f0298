"""A drafter's time on a device: what is copied, what a stop waits for, and that nothing is lost on the way.

The "device" is other memory of the host, which shows all but speed.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from tiny_policy import drafter_of, same_state
from transformers import Qwen2Config

from verl_tlt.drafter import (
    DeviceResidency,
    DrafterTrainer,
    acceptance,
    device_residency,
    drafter_config,
    evaluate,
    pack,
    session_bytes,
    train,
)
from verl_tlt.drafter.build import instantiate

AWAY = torch.device("cpu")
QWEN_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, vocab_size=152064, num_attention_heads=28, num_key_value_heads=4,
    num_hidden_layers=28, max_position_embeddings=32768, architectures=["Qwen2ForCausalLM"],
)  # fmt: skip


@pytest.fixture
def in_16_bits(monkeypatch):
    """Matrix products as on CUDA."""
    for module in (train, evaluate):
        monkeypatch.setattr(module, "mixed_precision", lambda device: torch.autocast("cpu", torch.bfloat16))


@pytest.fixture
def trainer(drafter):
    return DrafterTrainer(drafter, ttt_steps=3, warmup_steps=2)


def homes(trainer):
    return [t.data_ptr() for t in (*trainer.model.parameters(), *trainer.model.buffers())]


def test_a_stop_moves_what_training_changed_and_nothing_else(in_16_bits, monkeypatch, trainer, sequences):
    arrived = []

    def copy(target, source):
        target.copy_(source)
        arrived.append(target.nbytes)

    def copied():
        total = sum(arrived)
        arrived.clear()
        return total

    monkeypatch.setattr(device_residency, "_copy", copy)
    trained = sum(p.nbytes for p in trainer.parameters.values())
    frozen = sum(p.numel() for p in trainer.model.parameters() if not p.requires_grad)
    buffers = sum(b.nbytes for b in trainer.model.buffers())
    at_home = homes(trainer)
    for session in range(3):
        with DeviceResidency(trainer, AWAY):
            there = copied()
            assert not set(homes(trainer)) & set(at_home), "something stayed behind"
            embedding = trainer.model.embed_tokens.weight
            assert embedding.dtype == torch.bfloat16 and next(iter(trainer.parameters.values())).dtype == torch.float32
            trainer.step(pack(sequences))
        assert copied() == 3 * trained
        moments = 2 * trained if session else 0  # there are none before the first step
        assert there == trained + moments + 2 * frozen + buffers
        assert homes(trainer) == at_home
    with DeviceResidency(trainer, AWAY, trains=False):
        assert copied() == trained + 2 * frozen + buffers
        acceptance(trainer.model, sequences, max_draft=2)
    assert copied() == 0


def test_sessions_away_are_sessions_at_home_to_the_bit(monkeypatch, policy, sequences):
    monkeypatch.setattr(device_residency, "FROZEN", torch.float32)

    def trained(away):
        trainer = DrafterTrainer(drafter_of(policy, seed=3), ttt_steps=2)
        for some in (sequences[:2], sequences[2:], sequences):
            with DeviceResidency(trainer, AWAY) if away else nullcontext():
                trainer.step(pack(some))
        return trainer.state()

    assert same_state(trained(True), trained(False))


def test_sixteen_bit_verifier_weights_teach_the_same(in_16_bits, trainer, sequences):
    plain = DrafterTrainer(trainer.model, ttt_steps=3)._forward(trainer._prepare(pack(sequences)))[0]
    with DeviceResidency(trainer, AWAY):
        result = trainer.step(pack(sequences))
    assert math.isfinite(result.loss) and not result.skipped
    assert result.loss == pytest.approx(float(plain), rel=0.02)


@pytest.mark.parametrize("where", ["inside", "on the way back"])
def test_a_session_that_fails_leaves_nothing_on_the_device(in_16_bits, monkeypatch, trainer, sequences, where):
    at_home, before = homes(trainer), trainer.state()["parameters"]

    def copy(target, source):
        if where == "on the way back" and target.data_ptr() in at_home:
            raise RuntimeError("the device is lost")
        target.copy_(source)

    monkeypatch.setattr(device_residency, "_copy", copy)
    with pytest.raises(RuntimeError), DeviceResidency(trainer, AWAY):
        trainer.step(pack(sequences))
        trainer._forward(trainer._prepare(pack(sequences)))[0].backward()
        raise RuntimeError("out of memory")
    assert homes(trainer) == at_home
    assert all(p.grad is None for p in trainer.parameters.values())
    after = trainer.state()["parameters"]
    assert torch.equal(after["fc.weight"], before["fc.weight"]) == (where == "on the way back")


def test_a_rehearsal_teaches_nothing(trainer):
    before = trainer.state()
    trainer.rehearse()
    assert same_state(before, trainer.state()) and (trainer.steps, trainer.skipped) == (0, 0)
    assert all(p.grad is None for p in trainer.parameters.values())


def test_what_a_7b_policys_drafter_needs():
    with torch.device("meta"):
        model = instantiate(drafter_config(QWEN_7B), "sdpa")
    assert session_bytes(model, rows=1024, passes=3) == pytest.approx(10e9, rel=0.05)
