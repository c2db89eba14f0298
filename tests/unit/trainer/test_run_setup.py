"""What a run is made of, from a config as verl composes it."""

import os

import pytest
import ray
from omegaconf import OmegaConf

from benchmarks.toy_job import CONSTANT
from verl_tlt.activation import apply
from verl_tlt.checks.recipe import compose, read_settings
from verl_tlt.config import BATCH_TOKENS, BUFFER_MB, TLTConfig
from verl_tlt.errors import TLTError
from verl_tlt.trainer import run_setup
from verl_tlt.trainer.run_setup import MOST_HELD_OUT, hardware_name, held_out_share, prepare, with_sizes

GIB = 2**30
SMALL_HEAD = {"memory": 8.0 * GIB}
PIPELINE = ["trainer.nnodes=2", "+actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4"]


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
        ("cuda", [], [], (4096, BUFFER_MB)),
        ("cuda", [], [SMALL_HEAD, {"memory": 1024.0 * GIB, "GPU": 8.0}], (4096, 13_106)),
        ("cuda", PIPELINE, [{"memory": 1024.0 * GIB, "GPU": 8.0}] * 2, (4096, 9_829)),
        ("cpu", [], [], (BATCH_TOKENS, BUFFER_MB)),
        (
            "cuda",
            [f"{CONSTANT}.drafter.batch_tokens=300", "tlt.buffer.max_mb=10"],
            [],
            (300, 10),
        ),
    ],
)
def test_controller_and_spot_workers_get_sizes_that_fit(composed, monkeypatch, device, given, nodes, sizes):
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(nodes))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])
    monkeypatch.setattr(ray, "cluster_resources", dict)
    config = composed(f"trainer.device={device}", *given)
    facts, start, spot = prepare(config, "sync")
    settings = spot.config
    assert (settings.drafter.batch_tokens, settings.buffer.max_mb) == sizes
    assert (facts.requests, spot.device, start.checkpoint) == (8, device, None)
    assert facts.active_share == 1.0, "a dense policy"
    context = config.data.max_prompt_length + config.data.max_response_length
    assert (settings.buffer.held_out, settings.buffer.window) == (MOST_HELD_OUT, min(4096, context))


@pytest.mark.parametrize(
    ("given", "prunes", "rotates"),
    [
        ([], False, 0),
        (["trainer.max_actor_ckpt_to_keep=3"], True, 3),
        (["trainer.max_actor_ckpt_to_keep=1"], True, 0),
        (["trainer.max_actor_ckpt_to_keep=3", "++trainer.remove_previous_ckpt_in_save=True"], True, 0),
        (["trainer.max_actor_ckpt_to_keep=3", "actor_rollout_ref.actor.checkpoint.async_save=True"], True, 0),
    ],
)
def test_when_verl_removes_old_policies_is_known(composed, given, prunes, rotates):
    facts, _, _ = prepare(composed(*given), "sync")
    assert (facts.prunes, facts.rotates) == (prunes, rotates)


@pytest.mark.parametrize(
    ("vocabulary", "rows"), [(32_000, 4096), (128_256, 2048), (151_936, 2048), (256_000, 1024), (64, 4096)]
)
def test_micro_batches_on_an_accelerator_are_as_large_as_their_logits_allow(vocabulary, rows):
    assert with_sizes(TLTConfig(), vocabulary, True, 0, 8, 0).drafter.batch_tokens == rows


@pytest.mark.parametrize("path", [None, "checkpoints"])
def test_a_resumption_without_its_path_is_one_sentence(path):
    trainer = OmegaConf.create({"resume_mode": "resume_path", "resume_from_path": path})
    with pytest.raises(TLTError, match=r"trainer\.resume_from_path"):
        run_setup._resume_dir(trainer)


def test_buffers_get_what_is_left_of_the_workers_share_of_a_node():
    for node_gib, worker_gib, spread, mb in (
        (1024, 0, 1, 13_107), (1024, 9, 1, 6_963), (64, 9, 1, BUFFER_MB), (0, 9, 1, BUFFER_MB), (1024, 9, 3, 4_177),
    ):  # fmt: skip
        sizes = with_sizes(TLTConfig(), 151_936, True, node_gib * GIB, 8, worker_gib * GIB, spread)
        assert sizes.buffer.max_mb == mb
        share = 0.15 * node_gib * GIB / 8
        # Half a buffer is on its way from the actor at most, and all of it on one of the nodes it goes to.
        held = (worker_gib << 30) + sizes.buffer.max_bytes * (1 + 0.5 * spread)
        assert held <= share or mb == BUFFER_MB


@pytest.mark.parametrize(
    ("settings", "prompts", "workers", "share"),
    [
        ({}, 6, 2, 0.25),
        ({}, 512, 1, 0.25),  # it captures two long responses of a step, whatever the step has
        ({}, 512, 16, 6 / 32),
        ({}, 512, 64, 0.1),
        ({}, 30, 64, 0.2),
        ({"window": 512}, 512, 8, 0.1),
        ({"tokens_per_step": 100}, 512, 1, 0.25),
        ({"held_out": 0.02}, 6, 2, 0.02),
    ],
)
def test_the_fewer_prompts_are_captured_the_more_of_them_are_held_out(settings, prompts, workers, share):
    buffer = TLTConfig.from_dict({"buffer": settings}).buffer
    assert held_out_share(buffer, prompts, workers) == pytest.approx(share)


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
