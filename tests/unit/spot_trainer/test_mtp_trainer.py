"""A spot trainer with a policy's MTP head: all it does is what it does with an EAGLE-3 head."""

import torch
from mtp_policy import SHAPE, make_mtp_policy
from safetensors.torch import load
from tiny_trainer import FACTS, make_trainer, same, session

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import PolicyStates, Text, VerifierWeights, load_drafter, load_policy, to_numpy16
from verl_tlt.messages.training import VerifierArrays

CONFIG = TLTConfig.from_dict({"drafter": {"method": "mtp"}})
PLAN = {"config": CONFIG, "batch_tokens": 128, "learning_rate": 3e-3, "warmup_steps": 2, "max_epochs": 6.0}


def rollouts(policy_dir):
    """What the actor hands over: texts of the policy with its last states in 16 bits."""
    policy = load_policy(policy_dir, "cpu").float()
    torch.manual_seed(0)
    texts = policy.generate(torch.randint(3, SHAPE["vocab_size"], (40, 3)), do_sample=True, top_k=0, max_new_tokens=24)
    found = PolicyStates(policy, ())([Text(tuple(text), 3) for text in texts.tolist()])
    return [type(s)(s.tokens, s.prompt_len, s.aux.bfloat16(), s.last.bfloat16()) for s in found]


def test_it_trains_judges_publishes_and_resumes(tmp_path):
    policy_dir = tmp_path / "policy"
    make_mtp_policy(policy_dir, "mimo")
    trainer = make_trainer(policy_dir, **PLAN)
    parts = VerifierWeights.from_policy_dir(policy_dir)
    arrays = VerifierArrays(**{part: to_numpy16(tensor) for part, tensor in vars(parts).items()})
    trainer.add(1, rollouts(policy_dir), arrays)
    done = session(trainer)
    assert done.steps >= 8 and done.skipped == 0
    tau = session(trainer).verdict.tau
    assert tau["candidate"] > tau["served"] + 0.05
    trainer._approved = trainer.candidate
    file = trainer.export()
    assert load(file.weights).keys() == trainer.candidate.keys()
    step = tmp_path / "global_step_1"
    trainer.save(str(step / "tlt_drafter"), FACTS)
    load_drafter(step / "tlt_drafter", policy_dir)
    other = make_trainer(policy_dir, resume_from=step, **PLAN)
    assert other.trainer.steps == trainer.trainer.steps
    assert same(other.served, trainer.served) and same(other.initial, trainer.initial)
    replaced = make_trainer(policy_dir, published=file, **PLAN)
    assert not same(replaced.served, replaced.initial)
