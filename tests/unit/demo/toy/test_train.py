import dataclasses

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from demo.toy import task, train

SHORT = train.TrainConfig(steps=2, batch_tokens=64)


@pytest.fixture(scope="module")
def policy():
    return train.train(SHORT)


def test_a_seed_fixes_the_policy(policy):
    again, other = train.train(SHORT), train.train(dataclasses.replace(SHORT, seed=1))
    weights = policy.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in again.state_dict().items())
    assert not torch.equal(weights["lm_head.weight"], other.state_dict()["lm_head.weight"])


def test_it_is_saved_for_verl_and_vllm(policy, tmp_path):
    train.save_policy(policy, tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16 and loaded.config.model_type == "qwen3"
    assert loaded.generation_config.eos_token_id == task.TOKEN_ID[task.EOS]
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == loaded.config.vocab_size == 64
