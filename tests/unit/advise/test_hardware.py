"""What a recipe asks for, what fits in its KV cache, and what steps cost beside what others measured on GPUs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from recipes.memory import decoding_requests, kv_needed
from verl_tlt.checks.recipe import compose
from verl_tlt.commands.advise.hardware import GPUS, find_shape, kv_capacity, read_workload, step_cost
from verl_tlt.commands.advise.scenario import SETTINGS
from verl_tlt.errors import TLTError
from verl_tlt.speculation.types import OFF

ROLLOUT = "actor_rollout_ref.rollout"
RECIPE = (
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B", "data.train_batch_size=64", "data.max_prompt_length=1024",
    "data.max_response_length=8192", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.max_num_seqs=256", f"{ROLLOUT}.gpu_memory_utilization=0.6",
)  # fmt: skip
PAPER = "arxiv.org/abs/2511.16665, Table 2: tokens a second without drafts"
OTHERS = "github.com/tenstorrent/tt-inference-server/issues"
MEASURED = [
    ("Qwen2.5-7.6B", "H100", 1, 1e3 / 164.65, PAPER),
    ("Qwen2.5-7.6B", "A100", 1, 1e3 / 92.83, PAPER),
    ("Qwen2.5-7.6B", "B200", 1, 1e3 / 259.71, PAPER),
    ("Qwen2.5-72.7B", "H100", 2, 30.9, f"{OTHERS}/143"),
    ("Qwen3-1.7B", "A100", 1, 4.6, f"{OTHERS}/340"),
]
"""Policy with its exact size, GPUs, milliseconds of a step that decodes one request, and where that was said."""


def work_of(*more):
    return read_workload(compose([*RECIPE, *more], "ppo_trainer"))


def costs(policy, gpu, devices):
    """Step costs by setting."""
    shape = find_shape(policy)[0]
    return {name: step_cost(shape, GPUS[gpu], devices, False, guess.step) for name, guess in SETTINGS.items()}


@pytest.mark.parametrize(("policy", "gpu", "devices", "measured_ms", "source"), MEASURED)
def test_a_step_of_one_request_is_in_the_range(policy, gpu, devices, measured_ms, source):
    ms = {name: 1e3 * cost.seconds(1, 128, OFF) for name, cost in costs(policy, gpu, devices).items()}
    assert ms["low"] <= measured_ms <= ms["high"] and ms["likely"] == pytest.approx(measured_ms, rel=0.25), source


def test_a_pass_of_the_drafter_is_in_the_range():
    """The paper's Fig. 13, 32B on 4 H100, 16 tokens verified: each further pass adds 6.3 % of a plain step."""
    measured = (7.25 / 2.94 - 4.63 / 2.71) / 12  # accept length over speed-up, by drafts of 16 and 4
    shares = {
        name: (cost.seconds(1, 128, 7) - cost.seconds(1, 128, 6)) / cost.seconds(1, 128, OFF)
        for name, cost in costs("Qwen2.5-32.8B", "H100", 4).items()
    }
    assert shares["high"] < measured < shares["low"], shares


@pytest.mark.parametrize(("policy", "devices", "ratio"), [("Qwen3-30B-A3B", 2, 2.8), ("Qwen2.5-7B", 1, 1.55)])
def test_what_a_draft_of_seven_costs_a_request_alone(policy, devices, ratio):
    """By hand, of H100s: a token reads 1.0 ms of a mixture's 10 ms of weights, eight tokens 5.7 ms, beside 2.9 ms of
    48 layers and 2.5 ms of drafts; a dense 7B's 4.6 ms are read by one token and by eight, beside 1.7 ms and 3.4 ms.
    """
    cost = costs(policy, "H100", devices)["likely"]
    assert cost.seconds(1, 0, 7) / cost.seconds(1, 0, OFF) == pytest.approx(ratio, abs=0.1)


def test_an_8b_policy_leaves_room_for_two_hundred_thousand_tokens_at_60_percent_of_80_gb():
    work, gpu = work_of(), GPUS["H100"]
    shape, _ = find_shape(work.policy)
    assert kv_capacity(work, shape, gpu) == pytest.approx(29e9 / 147456, rel=0.03)
    two = replace(work, tensor_parallel=2)
    assert kv_capacity(two, shape, gpu) > 2 * kv_capacity(work, shape, gpu), "weights once"
    assert kv_capacity(replace(work, memory_utilization=0.2), shape, gpu) == 0


def test_requests_need_what_lengths_drawn_alike_up_to_the_limit_hold_at_their_peak():
    work = work_of()
    assert decoding_requests(work) == 64 and decoding_requests(replace(work, max_num_seqs=48)) == 48
    lengths = np.random.default_rng(0).uniform(0, work.response, 200_000)
    held = [(lengths > t).mean() * (work.prompt / 4 + t) for t in range(0, work.response, 16)]
    assert kv_needed(work) == pytest.approx(64 * max(held), rel=0.01)
    short = replace(work, response=100, prompt=4000)
    assert kv_needed(short) == 64 * 1000, "prompts that outweigh all responses are most at the start"


def test_the_work_of_recipes_is_read():
    sync = work_of("actor_rollout_ref.actor.use_kl_loss=true", "algorithm.adv_estimator=grpo")
    assert (sync.replicas, sync.requests, sync.reference, sync.critic) == (8, 512, True, False)
    apart = ("trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=2")
    assert work_of(*apart).replicas == 4
    assert work_of("algorithm.adv_estimator=gae").critic


def test_a_policys_shape_is_that_of_its_config(tmp_path, monkeypatch):
    fields = {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936, "num_attention_heads": 32,
              "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "model_type": "qwen3",
              "max_position_embeddings": 40960}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    shape, source = find_shape(f"~/{tmp_path.name}")
    assert shape.parameters == pytest.approx(8.2e9, rel=0.02) and shape.kv_bytes == 147456 and "config" in source
    assert shape.head == 32_768 * 4096, "of a new drafter, not of the policy"
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "hidden_size": 2048,
               "num_hidden_layers": 48, "num_key_value_heads": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields | experts))
    shape, _ = find_shape(str(tmp_path))
    assert shape.parameters == pytest.approx(30.5e9, rel=0.03) and shape.active == pytest.approx(3.3e9, rel=0.1)


def test_a_policy_that_is_not_here_has_the_shape_of_its_names_size():
    named, _ = find_shape("Qwen/Qwen3-30B-A3B")
    assert (named.parameters, named.active, named.kv_bytes) == (30e9, 3e9, 98e3), "a mixture is like a mixture"
    assert find_shape("Qwen/Qwen2.5-32B")[0].kv_bytes == 262e3
    for unsized in ("mine/policy", "mine/policy-0b"):
        with pytest.raises(TLTError, match="its name does not tell its size; say it with --parameters"):
            find_shape(unsized)
