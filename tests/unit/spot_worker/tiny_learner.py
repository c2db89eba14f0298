"""A learner of a tiny policy, and something for it to learn from: no policy is run."""

import json

import numpy as np
import torch

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import TrainingSequence
from verl_tlt.messages.training import DrafterProvenance, RolloutSampling, VerifierArrays
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.merge import average_slice
from verl_tlt.trainer.run_setup import first_drafter

HIDDEN, VOCABULARY = 32, 24
SAMPLING = RolloutSampling(temperature=1.0, top_p=1.0, top_k=-1)
FACTS = DrafterProvenance("policy", "data", "hass", 1.0, 1, 3, (0.5, 0.4, 0.3), 1234)
"""Of a checkpoint: version, RL step, acceptance and tokens come last."""
POLICY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
CONFIG = TLTConfig.from_dict(
    {"buffer": {"min_tokens": 10, "held_out": 0.4}, "drafter": {"batch_tokens": 64}, "spot": {"max_epochs": 1.0}}
)


def first_of(directory, config=CONFIG, resume_from=None):
    """The first drafter of a run; `directory` becomes the policy's unless it is one."""
    directory.mkdir(exist_ok=True)
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps(POLICY))
    return first_drafter(config, str(directory), "bfloat16", 64, resume_from)


def learner_arguments(directory, config=CONFIG, resume_from=None):
    """Of a learner or a worker, up to the device."""
    return "a", config, str(directory), first_of(directory, config, resume_from).trainable, SAMPLING


def make_learner(directory, sequences=0, *, device="cpu", config=CONFIG, resume_from=None, **more):
    """A learner on the host with so many sequences of the first RL step."""
    learner = SpotLearner(*learner_arguments(directory, config, resume_from), device, **more)
    if sequences:
        learner.add(1, texts(sequences), verifier_arrays())
    return learner


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


def merge_learners(learners, trained=None, slices=3):
    """Merge what some of them have trained (None: all), as a run does; returns the facts."""
    parts = [learner.hand_in(slices) for learner in trained or learners]
    merged = tuple(average_slice(column, last=True) for column in zip(*parts, strict=True))
    for learner in learners:
        learner.adopt(*merged)
    return merged[0].facts


def train_and_merge(learner):
    """Sessions of one learner until they count, and a merge of its own."""
    result = learner.train(lambda: False)
    while learner.unmerged_steps < CONFIG.spot.min_merge_steps:
        assert result.steps > 0
        result = learner.train(lambda: False)
    assert merge_learners([learner]).included == (learner.name,)
    return result


def same(left, right):
    """Whether two versions hold the same numbers."""
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
