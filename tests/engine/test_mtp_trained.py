"""An MTP head as it is trained here and as vLLM's own module runs it: the same probabilities for every draft.

Then a MiMo's is trained on the policy's rollouts, saved, and put back into the policy's folder: stock vLLM accepts what
was predicted.
"""

import inspect
import itertools

import numpy as np
import pytest
import torch
from mtp_policy import head_of, make_mtp_policy, without_head
from test_serve_drafter import GREEDY, PROMPT, K, decode
from tiny_engine import sampled
from vllm_by_hand import passes

from verl_tlt.drafter import (
    DrafterTrainer,
    PolicyStates,
    Text,
    acceptance,
    batches,
    load_policy,
    pack,
    save_drafter,
    train_until,
    write_back,
)

pytestmark = pytest.mark.engine

VOCAB = 96
SHAPE = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=128, max_position_embeddings=512)
RECURRENT = dict(head_dim=32, linear_key_head_dim=64, linear_value_head_dim=64)
EXPERTS = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts_per_tok=4)
"""Every token passes through all four: rounded to 16 bits, a router would now and then choose others."""
MTP = {"method": "mtp", "num_speculative_tokens": K, "draft_sample_method": "probabilistic"}


def watch_drafts(engine):
    """(position of the last known token but one, drafted ids [K], their probabilities [K, V]) of every draft of a
    batch of one request, as they come."""
    drafter, seen = engine.runner.drafter, []
    real = drafter.propose
    names = inspect.signature(type(drafter).propose)

    def propose(*args, **kwargs):
        ids = real(*args, **kwargs)
        given = names.bind(drafter, *args, **kwargs).arguments
        at = given.get("token_indices_to_sample")
        position = given["target_positions"][..., -1 if at is None else at[0]].reshape(-1)[0]
        seen.append((int(position), ids[0].clone(), drafter._last_draft_probs[0].clone()))
        return ids

    engine.patch.setattr(drafter, "propose", propose)
    return seen


# vLLM's CPU kernel of recurrent layers wants 16 bits, in which Qwen3.5's probabilities came within 0.053 of ours. Its
# kernel of experts wants widths that 32 divides.
@pytest.mark.parametrize(
    ("family", "more", "dtype", "atol"),
    [
        ("mimo", {}, torch.float32, 1e-4),
        pytest.param("qwen3_5", RECURRENT, torch.bfloat16, 0.1, marks=pytest.mark.heavy),
        pytest.param("qwen3_5_moe", RECURRENT | EXPERTS, torch.bfloat16, 0.1, marks=pytest.mark.heavy),
    ],
)
def test_a_drafts_probabilities_are_those_of_vllms_module(engine_of, tmp_path, family, more, dtype, atol):
    if family.startswith("qwen3_5"):
        pytest.importorskip("torchvision", reason="vLLM's module of Qwen3.5 imports it: run by `make test-vision`")
    make_mtp_policy(tmp_path, family, dtype, **SHAPE, **more)
    model, states = head_of(tmp_path), PolicyStates(load_policy(tmp_path, "cpu"), ())
    served = {"model": str(tmp_path), "dtype": str(dtype).removeprefix("torch."), "skip_tokenizer_init": True}
    with engine_of(drafter=None, speculative_config=MTP, mamba_ssm_cache_dtype="float32", **served) as engine:
        seen, prompt = watch_drafts(engine), [3, 14, 15, 9, 26]
        request = {"prompt_token_ids": prompt}
        (output,) = engine.llm.generate([request], sampled(40, temperature=1.0), use_tqdm=False)
        text = prompt + list(output.outputs[0].token_ids)
    assert len(seen) > 10
    for t, ids, probabilities in seen:
        known = text[: t + 2]
        if len(known) == t + 2:
            ours = passes(model, pack(states([Text((*known, *ids.tolist()), 0)])), K)
            found = torch.stack([logits[t] for logits, _ in ours]).softmax(-1)  # [K, V]
            torch.testing.assert_close(found, probabilities.float(), rtol=0, atol=atol)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A MiMo's folder whose head was trained on a few of its rollouts, and put back after a save without."""
    root = tmp_path_factory.mktemp("trained")
    policy = make_mtp_policy(root / "policy", "mimo", **SHAPE)
    torch.manual_seed(1)
    prompts = torch.randint(3, VOCAB, (16, PROMPT))
    texts = policy.generate(prompts, do_sample=True, top_k=0, max_new_tokens=64, min_new_tokens=64)
    model = head_of(root / "policy")
    sequences = PolicyStates(policy, ())([Text(tuple(text), PROMPT) for text in texts.tolist()])
    trainer = DrafterTrainer(model, learning_rate=3e-3, ttt_steps=2)
    train_until(trainer, batches(itertools.cycle(sequences), 280), lambda: trainer.steps >= 100)
    save_drafter(model, root / "head", {"policy": "mimo"})
    without_head(root / "policy", shards=2)
    write_back(root / "head", root / "policy")
    return root / "policy"


@pytest.fixture(scope="module")
def engine(trained, engine_of):
    """Stock vLLM, serving the policy's folder."""
    with engine_of(drafter=None, model=str(trained), speculative_config=MTP) as engine:
        yield engine


def test_greedy_acceptance_of_a_head_put_back_is_exactly_as_predicted(trained, engine):
    longer, _ = decode(engine, 8, GREEDY + K, temperature=0.0)
    texts, counted = decode(engine, 8, GREEDY, temperature=0.0)
    assert torch.equal(longer[:, : PROMPT + GREEDY], texts)
    # vLLM drafts until the last token but one is known, and counts what it accepts beyond the end too.
    sequences = PolicyStates(load_policy(trained, "cpu"), ())(
        [Text(tuple(text), PROMPT) for text in longer[:, :-1].tolist()]
    )
    scores = acceptance(head_of(trained), sequences, max_draft=K, temperature=0.0)
    expected = np.array([sum(s.drafts for s in scores), *np.sum([s.accepted for s in scores], axis=0)])
    np.testing.assert_allclose(counted, expected)
    assert 1.3 < 1 + counted[1:].sum() / counted[0] < K + 1
