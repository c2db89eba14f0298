"""What a run is made of, from a config as verl composes it."""

import json
import os

import pytest
import ray

from benchmarks.toy_job import CONSTANT
from verl_tlt.activation import apply
from verl_tlt.checks.recipe import compose, read_settings
from verl_tlt.config import TLTConfig
from verl_tlt.errors import TLTError
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.trainer.run_setup import (
    BATCH_TOKENS,
    LEAST_BUFFER,
    MEMORY_SHARE,
    MOST_HELD_OUT,
    TOKENS_PER_STEP,
    FirstDrafter,
    batch_tokens,
    buffer_bytes,
    hardware_name,
    held_out_share,
    prepare,
)

GIB = 2**30
SMALL_HEAD = {"memory": 8.0 * GIB}


@pytest.fixture
def composed(recipe):
    """Composes a run's config, rewritten for TLT, from further overrides."""

    def make(*given):
        config = compose(
            [
                "+trainer.plugin=tlt",
                f"actor_rollout_ref.model.path={recipe.actor_rollout_ref.model.path}",
                f"data.train_files={recipe.data.train_files}",
                f"trainer.default_local_dir={recipe.trainer.default_local_dir}",
                "actor_rollout_ref.rollout.name=vllm",
                "data.train_batch_size=4",
                "actor_rollout_ref.rollout.n=2",
                *given,
            ],
            "ppo_trainer",
        )
        apply(config, read_settings(config))
        return config

    return make


@pytest.mark.parametrize(
    ("device", "given", "nodes", "sizes"),
    [
        ("cuda", [], [], (4096, LEAST_BUFFER)),
        ("cuda", [], [SMALL_HEAD, {"memory": 1024.0 * GIB, "GPU": 8.0}], (4096, 150 * GIB)),
        ("cpu", [], [], (BATCH_TOKENS, LEAST_BUFFER)),
        ("cuda", [f"{CONSTANT}.drafter.batch_tokens=300", "tlt.buffer.max_mb=10"], [], (300, 10 << 20)),
    ],
)
def test_the_spot_trainer_gets_sizes_that_fit(composed, monkeypatch, device, given, nodes, sizes):
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(nodes))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])
    monkeypatch.setattr(ray, "cluster_resources", dict)
    config = composed(f"trainer.device={device}", *given)
    tlt, facts, start, plan = prepare(config, "sync")
    assert plan.batch_tokens == sizes[0] and plan.buffer_bytes == pytest.approx(sizes[1], rel=0.03)
    assert (facts.requests, plan.device, start.checkpoint, plan.checkpoint) == (8, device, None, None)
    assert facts.cold_start_s == (30.0 if device == "cuda" else 0.0)
    context = config.data.max_prompt_length + config.data.max_response_length
    assert (plan.held_out, plan.window) == (MOST_HELD_OUT, min(4096, context))
    assert tlt.buffer.tokens_per_step == TOKENS_PER_STEP
    positions = json.loads(start.served.config)["transformer_layer_config"]["max_position_embeddings"]
    assert positions >= context + tlt.speculation.max_draft_length


@pytest.mark.parametrize(
    ("mode", "given", "most"),
    [
        ("sync", [], 8),
        ("sync", ["algorithm.filter_groups.max_inflight_gen_batches=3"], 8),
        ("sync", ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_inflight_gen_batches=3"], 24),
        ("colocate_async", [], None),
        ("separate_async", [], None),
    ],
)
def test_how_many_requests_verl_has_at_once(composed, mode, given, most):
    assert prepare(composed("trainer.device=cpu", *given), mode)[1].requests_at_once == most


@pytest.mark.parametrize(
    ("given", "prunes", "keeps"),
    [
        ([], False, 0),
        (["trainer.max_actor_ckpt_to_keep=3", "critic.enable=False"], True, 3),
        (["trainer.max_actor_ckpt_to_keep=1"], True, 0),
        (["trainer.max_actor_ckpt_to_keep=3", "++trainer.remove_previous_ckpt_in_save=True"], True, 0),
        (["trainer.max_actor_ckpt_to_keep=3", "actor_rollout_ref.actor.checkpoint.async_save=True"], True, 0),
        (["trainer.max_actor_ckpt_to_keep=3", "critic.enable=True"], True, 0),
        (["trainer.max_actor_ckpt_to_keep=3", "trainer.max_critic_ckpt_to_keep=3", "critic.enable=True"], True, 3),
    ],
)
def test_when_verl_removes_old_policies_is_known(composed, given, prunes, keeps):
    facts = prepare(composed(*given), "sync")[1]
    assert (facts.prunes, facts.keeps) == (prunes, keeps)


@pytest.mark.parametrize(("vocabulary", "rows"), [(64, 4096), (128_256, 2048), (256_000, 1024)])
def test_micro_batches_on_an_accelerator_are_as_large_as_their_logits_allow(vocabulary, rows):
    assert batch_tokens(vocabulary, accelerator=True) == rows


@pytest.mark.parametrize("given", [[], ["trainer.resume_from_path=checkpoints"]])
def test_a_resumption_without_its_path_is_one_sentence(composed, given):
    with pytest.raises(TLTError, match=r"trainer\.resume_from_path"):
        prepare(composed("trainer.resume_mode=resume_path", *given), "sync")


def test_spot_training_takes_no_more_of_a_nodes_memory_than_the_docs_say():
    """Drafter, optimizer and buffer, and a step's hidden states on their way: in the actor, and in the object store."""
    file = DrafterFile(0, "", b"")
    start = FirstDrafter(file, file, (), "", host_bytes=30 * GIB, token_bytes=4 * 2 * 8192)  # of a 70B policy
    buffer = buffer_bytes(TLTConfig(), start, 700 * GIB, TOKENS_PER_STEP, accelerator=True)
    arriving = 2 * TOKENS_PER_STEP * start.token_bytes
    assert start.host_bytes + buffer + arriving == MEMORY_SHARE * 700 * GIB
    assert buffer_bytes(TLTConfig(), start, 64 * GIB, TOKENS_PER_STEP, accelerator=True) == LEAST_BUFFER


def test_no_more_is_captured_where_verl_computes_log_probs_several_times_in_a_step(composed):
    each = {mode: prepare(composed(), mode)[0].buffer.tokens_per_step for mode in ("sync", "separate_async")}
    assert each == {"sync": TOKENS_PER_STEP, "separate_async": TOKENS_PER_STEP // 4}


@pytest.mark.parametrize(
    ("prompts", "tokens", "window", "share"),
    [(6, 65_536, 4096, 0.25), (512, 65_536, 4096, 0.25), (512, 262_144, 4096, 0.1), (30, 262_144, 4096, 0.2),
     (512, 65_536, 512, 0.1), (512, 100, 4096, 0.25)],
)  # fmt: skip
def test_the_fewer_prompts_are_captured_the_more_of_them_are_held_out(prompts, tokens, window, share):
    assert held_out_share(prompts, tokens, window) == pytest.approx(share)


@pytest.mark.parametrize(
    ("resources", "accelerator", "name"),
    [
        (["CPU", "accelerator_type:H100"], True, "H100"),
        (["accelerator_type:L4", "accelerator_type:A100"], True, "A100, L4"),
        (["CPU", "GPU"], True, "GPUs that Ray has no name for"),
        (["accelerator_type:H100"], False, f"CPU, {os.cpu_count()} cores"),
    ],
)
def test_a_run_on_gpus_is_never_said_to_be_on_a_cpu(resources, accelerator, name):
    assert hardware_name(resources, accelerator) == name
