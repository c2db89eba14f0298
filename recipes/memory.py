"""Whether a recipe's engines hold their requests, and fit on a GPU of 80 GB beside what the actor leaves there.

Every recipe asks for such GPUs. A policy's size is taken from its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_tlt.checks.recipe import select
from verl_tlt.commands.advise.hardware import (
    BESIDE_BYTES,
    GPUS,
    Shape,
    Workload,
    find_shape,
    kv_capacity,
    read_workload,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

GPU = GPUS["H100"]
WEIGHT_BYTES, MOMENT_BYTES = 4, 8
"""Of a parameter that verl's FSDP engine keeps in fp32, and of its two moments."""
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
COLUMNS = (
    "Engines", "Share of a GPU", "Actor beside it", "KV cache holds", "Decode at once", "Need at most",
    "Full at a mean context of",
)  # fmt: skip
"""Tokens, each of one engine."""


def decoding_requests(work: Workload) -> int:
    """Requests that an engine decodes at once when a rollout begins; others wait."""
    return min(work.max_num_seqs, -(-work.requests // work.replicas))


def kv_needed(work: Workload) -> int:
    """Tokens of context that these requests hold at one time at most, if every length up to the limit is as frequent.

    After t tokens a share of `1 - t / response` still decodes, each request with prompt + t tokens; its maximum over t.
    Prompts are taken to have a quarter of the longest. Lengths with more short ones need less.
    """
    prompt, response = work.prompt / 4, max(work.response, 1)
    most = prompt if prompt >= response else (prompt + response) ** 2 / (4 * response)
    return round(decoding_requests(work) * most)


def kept_bytes(config: DictConfig, shape: Shape, gpus: int) -> float:
    """Bytes that actor and critic keep on each GPU while engines decode: what they do not move to the host."""
    trained = 0.0 if select(config, "actor_rollout_ref.model.lora_rank", 0) else shape.parameters  # an adapter is small
    parts = [f"{ACTOR}.megatron" if select(config, f"{ACTOR}.strategy") == "megatron" else f"{ACTOR}.fsdp_config"]
    parts += ["critic.fsdp"] if select(config, "algorithm.adv_estimator") == "gae" else []
    kept = 0.0
    for part in parts:
        kept += 0.0 if select(config, f"{part}.param_offload", False) else WEIGHT_BYTES * shape.parameters
        kept += 0.0 if select(config, f"{part}.optimizer_offload", False) else MOMENT_BYTES * trained
    return kept / gpus


def problems(config: DictConfig) -> list[str]:
    """Why a recipe's engines would preempt requests, or not fit beside what else is on their GPUs; empty: nothing."""
    work, found = read_workload(config), []
    shape, _ = find_shape(work.policy)
    holds, needs = kv_capacity(work, shape, GPU), kv_needed(work)
    if holds < needs:
        found.append(
            f"The {decoding_requests(work)} requests of an engine need up to {needs} tokens of KV cache, which holds "
            f"{holds}: lower {ROLLOUT}.max_num_seqs or raise {ROLLOUT}.gpu_memory_utilization."
        )
    total = work.memory_utilization * GPU.memory + kept_bytes(config, shape, work.gpus) + BESIDE_BYTES
    if total > GPU.memory:
        found.append(f"Engine and actor take {total / 1e9:.0f} GB of {GPU.memory / 1e9:.0f} GB.")
    return found


def row(config: DictConfig) -> tuple[str, ...]:
    """The cells of a recipe in the table of README.md, see `COLUMNS`."""
    work = read_workload(config)
    shape, _ = find_shape(work.policy)
    holds, requests = kv_capacity(work, shape, GPU), decoding_requests(work)
    return (
        f"{work.replicas} of {work.tensor_parallel} GPU{'s' * (work.tensor_parallel > 1)}",
        f"{work.memory_utilization:.0%}",
        f"{kept_bytes(config, shape, work.gpus) / 1e9:.0f} GB",
        f"{holds / 1e3:,.0f}k",
        f"{requests} of {-(-work.requests // work.replicas)}",
        f"{kv_needed(work) / 1e3:,.0f}k",
        f"{holds / requests / 1e3:.1f}k of {(work.prompt + work.response) / 1e3:.1f}k",
    )
