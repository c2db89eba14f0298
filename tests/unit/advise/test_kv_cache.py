"""What fits in an engine's KV cache, and what its requests need, from a recipe's numbers."""

import dataclasses

import numpy as np
import pytest

from recipes.memory import decoding_requests, kv_needed
from verl_tlt.checks.recipe import compose
from verl_tlt.commands.advise.hardware import GPUS, find_shape, kv_capacity, read_workload

ROLLOUT = "actor_rollout_ref.rollout"
RECIPE = (
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B", "data.train_batch_size=64", "data.max_prompt_length=1024",
    "data.max_response_length=8192", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.max_num_seqs=256", f"{ROLLOUT}.gpu_memory_utilization=0.6",
)  # fmt: skip


@pytest.fixture(scope="module")
def work():
    return read_workload(compose(RECIPE, "ppo_trainer"))


def test_an_8b_policy_leaves_room_for_two_hundred_thousand_tokens_at_60_percent_of_80_gb(work):
    shape, _ = find_shape(work.policy)
    assert work.memory_utilization == 0.6
    assert kv_capacity(work, shape, GPUS["H100"]) == pytest.approx(29e9 / 147456, rel=0.03)
    two = dataclasses.replace(work, tensor_parallel=2)
    assert kv_capacity(two, shape, GPUS["H100"]) > 2 * kv_capacity(work, shape, GPUS["H100"]), "weights once"
    assert kv_capacity(dataclasses.replace(work, memory_utilization=0.2), shape, GPUS["H100"]) == 0


def test_requests_need_what_lengths_drawn_alike_up_to_the_limit_hold_at_their_peak(work):
    """Against the most that drawn lengths hold at any token."""
    assert decoding_requests(work) == 64 and decoding_requests(dataclasses.replace(work, max_num_seqs=48)) == 48
    lengths = np.random.default_rng(0).uniform(0, work.response, 200_000)
    held = [(lengths > t).mean() * (work.prompt / 4 + t) for t in range(0, work.response, 16)]
    assert kv_needed(work) == pytest.approx(64 * max(held), rel=0.01)
    short = dataclasses.replace(work, response=100, prompt=4000)
    assert kv_needed(short) == 64 * 1000, "prompts that outweigh all responses are most at the start"
