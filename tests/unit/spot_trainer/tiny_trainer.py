"""A spot trainer of a tiny policy, and something for it to learn from: no policy is run."""

import json
from dataclasses import replace

import numpy as np
import torch

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import TrainingSequence
from verl_tlt.messages.training import DrafterProvenance, SpotPlan, VerifierArrays
from verl_tlt.spot_trainer.trainer import SpotTrainer
from verl_tlt.trainer.run_setup import first_drafter

HIDDEN, VOCABULARY = 32, 24
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
FACTS = DrafterProvenance("policy", "data", "hass", 1.0, 1, 3, (0.5, 0.4, 0.3), 1234)
"""Of a checkpoint: version, RL step, acceptance and tokens come last."""
POLICY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
CONFIG = TLTConfig()
VERSIONS = ("candidate", "served", "initial")


def first_of(directory, config=CONFIG, resume_from=None):
    """The first drafter of a run; `directory` becomes the policy's unless it is one."""
    directory.mkdir(exist_ok=True)
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps(POLICY))
    return first_drafter(config, str(directory), "bfloat16", 64, resume_from)


def plan_of(directory, config=CONFIG, resume_from=None, **changed):
    """Small micro-batches, and much that is held out."""
    start = first_of(directory, config, resume_from)
    plan = SpotPlan(
        policy_dir=str(directory), drafter=start.trainable, sampling=SAMPLING, dtype="bfloat16", batch_tokens=64,
        min_tokens=10, held_out=0.4, max_epochs=1.0, window=64,
        checkpoint=str(start.checkpoint) if start.checkpoint else None,
    )  # fmt: skip
    return replace(plan, **changed)


def make_trainer(directory, sequences=0, *, published=None, draft_ids=None, **plan):
    """A spot trainer with so many sequences of the first RL step; `plan` is `plan_of`'s."""
    trainer = SpotTrainer(plan_of(directory, **plan), published, draft_ids)
    if sequences:
        trainer.add(1, texts(sequences), verifier_arrays())
    return trainer


def texts(count, seed=0):
    """Random sequences of 20 tokens."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=rng).bfloat16()

    return [
        TrainingSequence(torch.randint(VOCABULARY, (20,), generator=rng), 2, draw(20, 3 * HIDDEN), draw(20, HIDDEN))
        for _ in range(count)
    ]


def verifier_arrays(seed=0):
    """Random ones."""
    head = np.random.default_rng(seed).normal(size=(VOCABULARY, HIDDEN)).astype(np.float16)
    return VerifierArrays(head, head, np.ones(HIDDEN, np.float16))


def session(trainer, should_stop=lambda: False, device=0):
    return trainer.train(device, should_stop)


def stopped_after(trainer, steps):
    """A session that is stopped after so many optimizer steps."""
    until = trainer.trainer.steps + steps
    return session(trainer, lambda: trainer.trainer.steps >= until)


def publish(trainer):
    """Train, judge and export, whatever the gate says."""
    session(trainer)
    trainer._approved = trainer.candidate
    exported = trainer.export()
    assert exported is not None
    return exported


def same(left, right):
    """Whether two versions hold the same numbers."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
