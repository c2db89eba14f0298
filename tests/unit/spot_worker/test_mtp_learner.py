"""A spot worker's learner with a policy's MTP head: all it does is what it does with an EAGLE-3 head."""

import pytest
import torch
from mtp_policy import SHAPE, make_mtp_policy
from safetensors.torch import load
from tiny_learner import FACTS, make_learner, merge_learners, same

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import PolicyStates, Text, VerifierWeights, load_drafter, load_policy, to_numpy16
from verl_tlt.messages.training import VerifierArrays
from verl_tlt.spot_worker.merge import checksums

CONFIG = TLTConfig.from_dict(
    {
        "buffer": {"min_tokens": 10, "held_out": 0.4},
        "drafter": {"method": "mtp", "batch_tokens": 128, "learning_rate": 3e-3, "warmup_steps": 2},
        "spot": {"max_epochs": 6.0},
    }
)


def rollouts(policy_dir):
    """What the tap hands over: texts of the policy with its last states in 16 bits."""
    policy = load_policy(policy_dir, "cpu").float()
    torch.manual_seed(0)
    texts = policy.generate(torch.randint(3, SHAPE["vocab_size"], (40, 3)), do_sample=True, top_k=0, max_new_tokens=24)
    found = PolicyStates(policy, ())([Text(tuple(text), 3) for text in texts.tolist()])
    return [type(s)(s.tokens, s.prompt_len, s.aux.bfloat16(), s.last.bfloat16()) for s in found]


@pytest.mark.parametrize("kind", ["mimo", "qwen3_5"])
def test_it_trains_merges_judges_publishes_and_resumes(kind, tmp_path):
    policy_dir = tmp_path / "policy"
    make_mtp_policy(policy_dir, kind)
    learner = make_learner(policy_dir, config=CONFIG)
    parts = VerifierWeights.from_policy_dir(policy_dir)
    arrays = VerifierArrays(**{part: to_numpy16(tensor) for part, tensor in vars(parts).items()})
    learner.add(1, rollouts(policy_dir), arrays)
    done = learner.train(lambda: False)
    assert done.steps >= CONFIG.spot.min_merge_steps and done.skipped == 0
    assert merge_learners([learner]).included == ("a",)
    scores = learner.train(lambda: False).scores
    assert scores.accept_length("candidate") > scores.accept_length("served") + 0.05
    file = learner.export(1, "bfloat16", [0.5, 0.4, 0.3])
    assert load(file.weights).keys() == learner.versions.candidate.keys()
    learner.mark_exported()
    learner.mark_published()
    saved = checksums(learner.trainer, learner.versions)
    directory = tmp_path / "global_step_1" / "tlt_drafter"
    learner.save(str(directory), FACTS)
    load_drafter(directory, policy_dir)
    other = make_learner(policy_dir, config=CONFIG, resume_from=directory.parent)
    assert other.resume(str(directory)) == saved
    assert same(other.versions.served, learner.versions.served)
    replaced = make_learner(policy_dir, config=CONFIG, published=file)
    assert not same(replaced.versions.served, replaced.versions.initial)
