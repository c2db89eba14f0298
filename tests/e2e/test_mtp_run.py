"""A GRPO run of a MiMo whose MTP head has gone stale: the policy moved on without it. Spot training brings it back."""

import shutil

import pytest
import torch
from grpo_run import TLT, grpo
from mtp_policy import head_of, make_mtp_policy
from safetensors.torch import load_file, save_file

from tests.toy.assets import build_assets
from verl_tlt.drafter import (
    DrafterTrainer,
    PolicyStates,
    Text,
    accept_length,
    acceptance,
    batches,
    check_drafter,
    load_policy,
    save_drafter,
    train_until,
    write_back,
)

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

VOCAB = 65
"""The tokenizer's, to which Qwen2 adds a token: verl lets the rollout draw no others, whatever the actor says."""
SHAPE = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=256, max_position_embeddings=1024)


def states_of(policy_dir, seed, count=24):
    """So many texts of the policy, with its states."""
    policy = load_policy(policy_dir, "cpu").float()
    torch.manual_seed(seed)
    prompts = torch.randint(3, VOCAB, (count, 4))
    texts = policy.generate(prompts, do_sample=True, top_k=0, max_new_tokens=80, min_new_tokens=80)
    return PolicyStates(policy, ())([Text(tuple(text), 4) for text in texts.tolist()])


def move_on(policy_dir):
    """Other rows of the policy's output head for two thirds of the tokens, as if training had changed what it says."""
    tensors = load_file(policy_dir / "model.safetensors")
    moved = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[: 2 * VOCAB // 3]
    tensors["lm_head.weight"][moved] = tensors["lm_head.weight"][moved.roll(1)]
    save_file(tensors, policy_dir / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def stale(tmp_path_factory):
    """(folder with the assets, a policy whose head was good for what the policy was, accept lengths then and now)."""
    base = tmp_path_factory.mktemp("mtp")
    policy, toy = base / "policy", build_assets(base / "assets", width="small", train_rows=64, val_rows=8).policy
    make_mtp_policy(policy, "mimo", **SHAPE)
    for file in (*toy.glob("*token*"), toy / "chat_template.jinja"):
        shutil.copy(file, policy)
    shutil.copytree(policy, base / "untrained")
    model, texts = head_of(policy), states_of(policy, 0, count=48)
    trainer = DrafterTrainer(model, learning_rate=3e-3, warmup_steps=10)
    train_until(trainer, batches((t for _ in range(60) for t in texts), 512), lambda: trainer.steps >= 240)
    was = accept_length(acceptance(model, states_of(policy, 1), max_draft=2))
    write_back(save_drafter(model, base / "head", {}), policy)
    move_on(policy)
    now = accept_length(acceptance(head_of(policy), states_of(policy, 1), max_draft=2))
    assert now < was - 0.3, (was, now)
    return base, policy, was, now


@pytest.fixture(scope="module")
def run(stale):
    base, policy, *_ = stale
    return grpo(
        base / "run", base / "assets", 5, *TLT, f"actor_rollout_ref.model.path={policy}", "tlt.drafter.method=mtp",
        SAVE_FREQ="5",
    )  # fmt: skip


def test_the_heads_accept_length_recovers(run, stale):
    *_, was, now = stale
    lengths = [run.steps[step]["tlt/accept_length"] for step in sorted(run.steps)]
    assert lengths[0] == pytest.approx(now, abs=0.25), (lengths, was, now)
    assert lengths[-1] > lengths[0] + 0.5 * (was - now), (lengths, was, now)
    assert run.steps[5]["tlt/drafter_version"] >= 1
    assert run.steps[5]["tlt/reload_failures"] == 0.0


def test_what_was_published_is_served_and_nothing_failed(run):
    assert all(reload.ok for reload in run.trace.reloads)
    assert len({reload.version for reload in run.trace.reloads}) >= 2
    for step, metrics in run.steps.items():
        assert metrics.get("tlt/errors", 0.0) == 0.0 == metrics["tlt/spot_failures"], step
        assert metrics["training/rollout_probs_diff_max"] < 1e-4, step


def test_the_head_that_it_leaves_goes_back_into_the_policy(run, stale, tmp_path):
    _, policy, _, now = stale
    check_drafter(run.out / "drafter", policy)
    shutil.copytree(policy, tmp_path / "policy")
    write_back(run.out / "drafter", tmp_path / "policy")
    again = accept_length(acceptance(head_of(tmp_path / "policy"), states_of(tmp_path / "policy", 2), max_draft=2))
    assert again > now + 0.2, (again, now)


def test_a_head_that_knows_nothing_is_switched_off_after_three_slower_rollouts(stale):
    base, *_ = stale
    run = grpo(
        base / "noise", base / "assets", 5, "tlt.speculation.policy=live_table", "tlt.spot.enable=false",
        f"actor_rollout_ref.model.path={base / 'untrained'}", "tlt.drafter.method=mtp",
    )  # fmt: skip
    assert run.steps[1]["tlt/accept_length"] < 1.1
    assert [run.steps[step]["tlt/drafter_off_frac"] for step in range(1, 6)] == [0.0] * 3 + [1.0] * 2
    assert run.steps[1]["tlt/saved_estimate_s"] < 0.0 == run.steps[5]["tlt/saved_estimate_s"]
    assert all(step["tlt/errors"] == 0.0 for step in run.steps.values())
