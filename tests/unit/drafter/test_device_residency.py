"""A drafter's time on a device: what is copied, what a stop waits for, what is page-locked, and that nothing is lost.

The "device" is other memory of the host, which shows all but speed.
"""

import gc
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from tiny_policy import drafter_of, same_state
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import Qwen2Config

from verl_tlt.drafter import train
from verl_tlt.drafter.build import build_drafter, drafter_config, halve_frozen, instantiate
from verl_tlt.drafter.data import TrainingSequence, pack
from verl_tlt.drafter.evaluate import acceptance
from verl_tlt.drafter.memory import (
    DrafterMemory,
    activation_bytes,
    host_bytes,
    layout,
    page_locked,
    session_bytes,
)
from verl_tlt.drafter.train import DrafterTrainer, run_passes
from verl_tlt.drafter.verifier import VerifierWeights, refresh_verifier_weights

AWAY = torch.device("cpu")


def qwen2(**changes):
    """The config of Qwen2.5-7B, or of another size."""
    sizes = dict(
        hidden_size=3584, intermediate_size=18944, vocab_size=152064, num_attention_heads=28, num_key_value_heads=4,
        num_hidden_layers=28, max_position_embeddings=32768, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    return Qwen2Config(**{**sizes, **changes})


@pytest.fixture
def in_16_bits(monkeypatch):
    """Matrix products as on CUDA."""
    monkeypatch.setattr(train, "mixed_precision", lambda device: torch.autocast("cpu", torch.bfloat16))


@pytest.fixture
def trainer(drafter):
    halve_frozen(drafter)
    return DrafterTrainer(drafter, ttt_steps=3, warmup_steps=2)


def homes(trainer):
    return [t.data_ptr() for t in (*trainer.model.parameters(), *trainer.model.buffers())]


def moments(trainer):
    return [value for state in trainer.optimizer.state.values() for value in state.values()]


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
        return trainer, deepcopy(trainer.state())

    (away, state), (_, expected) = trained(True), trained(False)
    assert same_state(state, expected)
    places, averages = [t.data_ptr() for t in moments(away)], {t.data_ptr() for t in away.averages().values()}
    away.start_over()
    assert not any(t.any() for t in moments(away) if t.data_ptr() not in averages) and away.steps == 0
    away.load_state(state)
    assert same_state(away.state(), state) and [t.data_ptr() for t in moments(away)] == places, "it stays in the block"


@pytest.mark.parametrize("where", ["inside", "on the way back"])
def test_a_session_that_fails_leaves_nothing_on_the_device(in_16_bits, monkeypatch, trainer, sequences, where):
    memory = DrafterMemory(trainer)
    at_home, before = homes(trainer), deepcopy(trainer.state()["parameters"])

    def copy(target, source):
        if where == "on the way back" and target.data_ptr() == memory.block.data_ptr() + memory.changing:
            raise RuntimeError("the device is lost")
        target.copy_(source)

    monkeypatch.setattr("verl_tlt.drafter.memory._copy", copy)
    with pytest.raises(RuntimeError), memory.on(AWAY):
        trainer.step(pack(sequences))
        raise RuntimeError("out of memory")
    assert homes(trainer) == at_home
    assert all(p.grad is None for p in trainer.parameters.values())
    after = trainer.state()["parameters"]
    assert torch.equal(after["fc.weight"], before["fc.weight"]) == (where == "on the way back")


class FusedLoss(torch.autograd.Function):
    """Keeps what the fused losses of `speculators` keep of the logits, whose kernels no CPU has."""

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits, targets)
        return (logits - targets).float().square().mean(-1)


def kept_bytes(model, rows, passes):
    """Bytes that one step's passes over so many rows keep besides the model and the batch; each storage once."""
    hidden, states = model.hidden_size, torch.randn(rows + 1, 4 * model.hidden_size).bfloat16()
    text = TrainingSequence(torch.arange(rows + 1), 1, states[:, hidden:], states[:, :hidden])
    batch = DrafterTrainer(model, ttt_steps=passes).feed()(pack([text])).arrived()
    held = [*model.parameters(), *model.buffers(), *vars(batch).values()]
    known, kept = {t.untyped_storage().data_ptr() for t in held}, {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(note, lambda tensor: tensor):
        run_passes(model, batch, passes, {"fused": (FusedLoss.apply, 1.0)})
    return sum(kept.values())


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("passes", [1, 3])
def test_what_a_step_keeps_for_its_backward_pass_is_planned(passes, own_head):
    policy = qwen2(
        hidden_size=512, intermediate_size=768, vocab_size=512, num_attention_heads=8, num_key_value_heads=2,
        num_hidden_layers=8, max_position_embeddings=1024,
    )  # fmt: skip
    model = build_drafter(policy, attention="sdpa")  # as on CUDA
    weights = torch.zeros(512, 512, dtype=torch.bfloat16)
    refresh_verifier_weights(model, VerifierWeights(weights, weights, torch.ones(512)))
    if own_head:
        model.config.own_head = True
        model.lm_head.weight.data = torch.zeros(512, 512)
    halve_frozen(model)
    kept = kept_bytes(model, 256, passes)
    copies = sum(2 * p.numel() for p in model.parameters() if p.requires_grad)  # autocast's of what is trained
    logits = 2 * 256 * 512 * (passes + 1)
    assert kept <= activation_bytes(model, 256, passes) + copies + logits <= 1.2 * kept


def test_what_a_7b_policys_drafter_needs_of_device_and_host():
    with torch.device("meta"):
        model = instantiate(drafter_config(qwen2()), "sdpa")
        pruned = instantiate(drafter_config(qwen2(), draft_vocab_size=32_768), "sdpa")
    assert session_bytes(model, rows=1024, passes=3, scored=1024) == pytest.approx(13e9, rel=0.05)
    # Frozen and logits shrink, and four times as many rows take four times the activations; scores take the whole head.
    assert session_bytes(pruned, rows=4096, passes=3, scored=1024) == pytest.approx(15.5e9, rel=0.05)
    short, long = (session_bytes(pruned, rows=1024, passes=3, scored=scored) for scored in (1024, 8192))
    assert long - short > 8192 * 8 * 32_768 - 1024 * 20 * 32_768, "sequences are scored whole"
    # Eight times the trained weights in 32 bits; the policy's embedding and head in 16 bits; a pruned head too.
    assert (host_bytes(model), host_bytes(pruned)) == pytest.approx((11.40e9, 11.635e9), rel=0.001)


class Runtime(TorchFunctionMode):
    """CUDA's runtime as far as its last error goes: a refused call sets it, the next launch raises and clears it."""

    def __init__(self, refused):
        super().__init__()
        self.refused, self.calls, self.failed = refused, [], False
        self.cudaHostRegister = partial(self.call, "register")
        self.cudaHostUnregister = partial(self.call, "unregister")

    def call(self, name, *_):
        self.calls.append(name)
        self.failed = name == self.refused
        return int(self.failed)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("device", None) == "cuda" and self.failed:
            self.failed = False
            raise RuntimeError("CUDA error: invalid argument")
        return func(*args, **kwargs)


@pytest.mark.parametrize("refused", ["nothing", "register", "unregister"])
def test_a_refusal_is_no_error_of_the_next_kernel(monkeypatch, said, refused):
    runtime = Runtime(refused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with runtime:
        block = page_locked(1 << 20)
        torch.zeros(4, device="cuda")
        block.fill_(7)
        assert block.shape == (1 << 20,) and ("could not be page-locked" in said.text) is (refused == "register")
        del block
        gc.collect()
        torch.zeros(4, device="cuda")
    assert runtime.calls == ["register", "unregister"][: 1 if refused == "register" else 2]
