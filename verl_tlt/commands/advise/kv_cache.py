"""How many tokens an engine's KV cache holds, and how many its requests need."""

from __future__ import annotations

from verl_tlt.commands.advise.hardware import BYTES, Gpu, Shape
from verl_tlt.commands.advise.workload import Workload

BESIDE_BYTES = 3e9
"""Taken on each device of an engine by what is neither weights nor KV cache: context, activations, graphs, drafter.
An assumption."""


def kv_capacity(work: Workload, shape: Shape, gpu: Gpu) -> int:
    """Tokens of context that one engine's KV cache holds, with the drafter's layer; 0: not even the weights fit."""
    usable = work.tensor_parallel * (work.memory_utilization * gpu.memory - BESIDE_BYTES) - BYTES * shape.parameters
    return max(0, int(usable / (shape.kv_bytes * (1.0 + 1.0 / shape.layers))))


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
