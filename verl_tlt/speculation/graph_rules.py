"""Which draft lengths have CUDA graphs, and which of vLLM's model runners drafts them, by vLLM release.

A draft length without a captured graph looks dearer than it is. vLLM's V1 model runner captures FULL graphs for batches
in which every request has exactly 1 + K_max tokens, and PIECEWISE graphs (attention outside) by token count for
everything else; counts are rounded up to multiples of 1 + K_max, up to a largest one, beyond which a step runs eagerly.
`vllm_worker.cuda_graphs` has FULL graphs captured for the other draft lengths too, OFF and K=0 among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FULL_GRAPHS = "TLT_FULL_GRAPHS"
"""Environment variable of driver and engines: 0 leaves FULL graphs to the longest arm, as vLLM does."""
GRAPH_ARMS = (0, 1, 3, 7)
"""Draft lengths offered where there are graphs: 1, 2 and 4 tokens a request divide every captured size."""
LONGEST, LONGEST_WITHOUT_GRAPHS = 7, 3
"""K_max by default, where every arm has FULL graphs and where not: a longer one would have shorter drafts padded."""
OLDEST = (0, 24)
"""The first vLLM release, (major, minor), that can change the draft length from step to step."""
V2_DRAFTS_FROM = (0, 32)
"""The first release whose V2 runner drafts the length that it is asked for; older ones draft K_max."""


def runner_for(release: tuple[int, int]) -> Literal["V1", "V2"]:
    """The model runner for EAGLE drafts; n-gram drafts need V1 in every release."""
    return "V2" if release >= V2_DRAFTS_FROM else "V1"


def longest_draft(release: tuple[int, int], graphs: bool) -> int:
    """K_max where the user names none; `graphs`: the engines capture CUDA graphs, and may for every arm."""
    return LONGEST if graphs and runner_for(release) == "V1" else LONGEST_WITHOUT_GRAPHS


def token_limit(vllm_config: VllmConfig) -> int:
    """Tokens in the largest captured step, from vLLM's resolved config; 0 where nothing is captured."""
    compilation, width = vllm_config.compilation_config, 1 + vllm_config.num_speculative_tokens
    mode = getattr(compilation.cudagraph_mode, "name", "NONE")
    if vllm_config.model_config.enforce_eager or mode == "NONE":
        return 0
    return int(compilation.max_cudagraph_capture_size or 0) // width * width
