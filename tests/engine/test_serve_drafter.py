"""A saved drafter in stock vLLM: same greedy tokens, and the acceptance that `evaluate` predicts."""

import itertools

import numpy as np
import pytest
import torch
from tiny_engine import sampled

from verl_tlt.drafter import (
    DrafterTrainer,
    PolicyStates,
    Text,
    VerifierWeights,
    accept_length,
    acceptance,
    batches,
    build_drafter,
    load_drafter,
    refresh_verifier_weights,
    save_drafter,
    train_until,
)
from verl_tlt.server.engine_arguments import speculative_config

pytestmark = pytest.mark.engine

K, AUX, PROMPT, GREEDY = 3, (1, 2, 3), 6, 60
SHAPE = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # the smallest that vLLM's CPU attention has
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=2,
    dtype="float32",
)


def make_policy():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    policy = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).float().eval().requires_grad_(False)
    with torch.no_grad():  # peaked at temperature 1, and with a context that counts
        policy.model.embed_tokens.weight.copy_(torch.randn(96, 64))
        policy.model.norm.weight.uniform_(0.5, 1.5)
        policy.lm_head.weight.mul_(14)
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight.mul_(8)
            layer.mlp.down_proj.weight.mul_(8)
    return policy


def observe(policy, texts):
    """Texts of one length as recorded sequences."""
    return PolicyStates(policy, AUX)([Text(tuple(text), PROMPT) for text in texts.tolist()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(policy, policy directory, drafter directory): the drafter overfitted on a few of the policy's rollouts."""
    root = tmp_path_factory.mktemp("trained")
    policy = make_policy()
    policy.save_pretrained(root / "policy")
    torch.manual_seed(1)
    prompts = torch.randint(3, 96, (16, PROMPT))
    mask = torch.ones_like(prompts)
    texts = policy.generate(prompts, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=64, min_new_tokens=64)
    sequences = observe(policy, texts)
    model = build_drafter(root / "policy", seed=0)
    refresh_verifier_weights(model, VerifierWeights.from_policy_dir(root / "policy"))
    trainer = DrafterTrainer(model, learning_rate=3e-3, ttt_steps=2)
    train_until(trainer, batches(itertools.cycle(sequences), 280), lambda: trainer.steps >= 100)
    save_drafter(model, root / "drafter", {"policy": "tests"})
    return policy, root / "policy", root / "drafter"


@pytest.fixture(scope="module")
def plain(trained, engine_of):
    """Greedy texts of stock vLLM without speculation; gone before `engine` starts, since a process holds one engine."""
    with engine_of(drafter=None, model=str(trained[1])) as stock:
        return decode(stock, 8, GREEDY + K, temperature=0.0)[0]


@pytest.fixture(scope="module")
def engine(trained, plain, engine_of):
    """Stock vLLM serving policy and drafter."""
    _, policy_dir, drafter_dir = trained
    config = speculative_config(str(drafter_dir), K)
    with engine_of(drafter=None, model=str(policy_dir), speculative_config=config) as engine:
        yield engine


def decode(engine, count, tokens, **sampling):
    """Prompt and response of `count` requests, int64 [count, PROMPT + tokens]; with vLLM's counters over them.

    These are [1 + K]: drafts verified, then how many of them had their first 1, 2, ... tokens accepted.
    """
    before = np.array(engine.counters())
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(3, 96, (count, PROMPT), generator=generator).tolist()
    requests = [{"prompt_token_ids": p} for p in prompts]
    outputs = engine.llm.generate(requests, sampled(tokens, **sampling), use_tqdm=False)
    texts = [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    counted = np.array(engine.counters()) - before
    return torch.tensor(texts), np.concatenate([counted[:1], counted[3:]])


def predicted(trained):
    """The drafter as `evaluate` has it."""
    _, policy_dir, drafter_dir = trained
    model = load_drafter(drafter_dir, policy_dir)
    refresh_verifier_weights(model, VerifierWeights.from_policy_dir(policy_dir))
    return model


def test_greedy_tokens_and_acceptance_are_exactly_as_predicted(trained, plain, engine):
    speculative, counted = decode(engine, 8, GREEDY, temperature=0.0)
    assert torch.equal(speculative, plain[:, : PROMPT + GREEDY])
    # vLLM drafts until the last token but one is known, and counts what it accepts beyond the end too.
    scores = acceptance(predicted(trained), observe(trained[0], plain[:, :-1]), temperature=0.0, max_draft=K)
    expected = np.array([sum(s.drafts for s in scores), *np.sum([s.accepted for s in scores], axis=0)])
    np.testing.assert_allclose(counted, expected)
    assert 1.3 < 1 + counted[1:].sum() / counted[0] < K + 1


@pytest.mark.parametrize("sampling", [dict(temperature=1.0), dict(temperature=0.8, top_p=0.9, top_k=20)])
def test_sampled_acceptance_is_as_predicted(trained, engine, sampling):
    texts, counted = decode(engine, 64, 96, **sampling)
    scores = acceptance(predicted(trained), observe(trained[0], texts), max_draft=K, **sampling)
    served = 1 + counted[1:].sum() / counted[0]
    assert accept_length(scores) == pytest.approx(served, rel=0.05)
    assert served > 1.2
