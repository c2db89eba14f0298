"""Which draft lengths have CUDA graphs, and which of vLLM's model runners drafts them, by vLLM release.

A step without a captured graph is slower, so engines with graphs use only draft lengths that have one. vLLM's V1 model
runner captures FULL graphs for batches in which every request has exactly 1 + K_max tokens, and PIECEWISE graphs
(attention outside) by token count for everything else, rounded up to multiples of 1 + K_max; beyond the largest a step
runs eagerly. V2 captures FULL graphs for all lengths of `draft_length_table`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GRAPH_LENGTHS = (0, 1, 3, 7)
"""Draft lengths offered where there are graphs: 1, 2 and 4 tokens a request divide every captured size."""
FEW_ROWS = 512
"""Tokens that a step may verify on a GPU in any case: their logits take a gigabyte or two."""
OLDEST = (0, 24)
"""The first vLLM release, (major, minor), that can change the draft length from step to step."""
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's environment variable for its model runner: 0 is V1 with any release."""
V2_DRAFTS_FROM = (0, 32)
"""The first release whose V2 runner drafts the length that it is asked for; older ones draft K_max."""
_RECURRENT = ("linear_num_", "mamba_", "ssm_")
"""Beginnings of config fields that describe layers with a state instead of a KV cache."""


def runner_for(release: tuple[int, int]) -> Literal["V1", "V2"]:
    """The model runner that speculates with this vLLM release, unless the environment asks for V1."""
    return "V2" if release >= V2_DRAFTS_FROM and os.environ.get(V2_RUNNER) != "0" else "V1"


def has_full_graphs(mode: str) -> bool:
    """Whether decode steps have graphs of their whole forward pass under a `cudagraph_mode` of vLLM."""
    return mode.startswith("FULL")


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether some layers keep a recurrent state instead of a KV cache, by the Hugging Face config."""
    fields = config.get("text_config") or config
    if any("attention" not in kind or "linear" in kind for kind in fields.get("layer_types") or ()):
        return True
    return any(name.startswith(_RECURRENT) for name, value in fields.items() if value is not None)


def draft_length_table(lengths: Sequence[int], max_num_seqs: int) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size` with every draft length: rows of (from batch, to batch, K).

    Its V2 runner captures graphs for these lengths, up to the largest batch of each row: so the longest comes last.
    """
    *shorter, longest = lengths
    shorter = shorter[: max_num_seqs - 1]
    rows = [[batch, batch, k] for batch, k in enumerate(shorter, 1)]
    return [*rows, [len(rows) + 1, max_num_seqs, longest]]


def token_limit(vllm_config: VllmConfig) -> int:
    """Tokens in the largest captured step, from vLLM's resolved config; 0 where nothing is captured."""
    compilation = vllm_config.compilation_config
    mode = getattr(compilation.cudagraph_mode, "name", "NONE")
    if vllm_config.model_config.enforce_eager or mode == "NONE":
        return 0
    request_tokens = 1 + vllm_config.num_speculative_tokens
    requests = int(compilation.max_cudagraph_capture_size or 0) // request_tokens
    return requests * request_tokens


def row_limit(on_cpu: bool, max_num_seqs: int) -> int:
    """Most tokens that a step without a graph may verify; 0: no limit.

    Each of them needs its logits, and vLLM leaves memory for those of two tokens of each request
    (`GPUModelRunner._dummy_sampler_run`).
    """
    return 0 if on_cpu else max(2 * max_num_seqs, FEW_ROWS)
