"""Which CUDA graphs an engine has for which draft length, by vLLM release.

A captured graph saves the launch of hundreds of kernels per step, most of a small batch's time, so a draft length
without one looks dearer than it is. vLLM's V1 model runner captures FULL graphs for batches in which every request has
exactly 1 + K_max tokens, and PIECEWISE graphs (attention outside) by token count for everything else; counts are
rounded up to multiples of 1 + K_max, up to a largest one, beyond which a step runs eagerly. `vllm_worker.cuda_graphs`
has FULL graphs captured for the other draft lengths too, OFF and K=0 among them, as stock vLLM has them. A test holds
both, as arithmetic, against vLLM's own dispatcher and runner, whose text is the same in 0.24 to 0.31.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FULL_GRAPHS = "TLT_FULL_GRAPHS"
"""Environment variable of driver and engines: 0 leaves FULL graphs to the longest arm, as vLLM does."""

LONGEST, LONGEST_WITHOUT_GRAPHS = 7, 3
"""K_max by default, where every arm has FULL graphs and where not: a longer one would have shorter drafts padded."""


@dataclass(frozen=True)
class GraphPlan:
    """What is set for one vLLM release and those after it, up to the next plan's."""

    first: tuple[int, int]
    """(major, minor)."""
    runner: Literal["V1", "V2"]
    """The model runner that is chosen (environment variable VLLM_USE_V2_MODEL_RUNNER)."""
    arms: tuple[int, ...]
    """Draft lengths offered by default, up to `tlt.speculation.max_draft_length`."""
    full: str
    """What has FULL graphs."""
    fallback: str
    """What runs otherwise."""
    reason: str


_V1_FULL = "every arm (the longest alone with `TLT_FULL_GRAPHS=0`, or in a runner that was changed)"
_V1_FALLBACK = "PIECEWISE, padded to a multiple of 1 + K_max; no arm is chosen whose step is above the largest graph"

PLANS = (
    GraphPlan(
        (0, 24), "V1", (0, 1, 3, 7), _V1_FULL, _V1_FALLBACK,
        "The V2 runner of this release drafts K_max whatever is asked, and vLLM's own table of draft lengths would take"
        " the FULL graphs away altogether; 1, 2 and 4 tokens a request divide every captured size.",
    ),
    GraphPlan(
        (0, 26), "V1", (0, 1, 3, 7), _V1_FULL, _V1_FALLBACK,
        "As 0.24: V2 still drafts K_max, and with a table its capture fails for EAGLE (vLLM issue 48494).",
    ),
    GraphPlan(
        (0, 28), "V1", (0, 1, 3, 7), _V1_FULL, _V1_FALLBACK,
        "As 0.26; V2 is vLLM's default here and is switched off.",
    ),
    GraphPlan(
        (0, 32), "V2", (0, 1, 3, 7), "the longest arm", "PIECEWISE",
        "The first V2 runner that drafts the length it is asked for. It captures other lengths only from vLLM's own "
        "table, which is not set. Not tested.",
    ),
)  # fmt: skip
"""By release; n-gram drafts need the V1 runner in all of them."""


def plan_for(release: tuple[int, int]) -> GraphPlan:
    """The plan of a vLLM release (0.24 or later)."""
    return next((plan for plan in reversed(PLANS) if release >= plan.first), PLANS[0])


def longest_draft(release: tuple[int, int], graphs: bool) -> int:
    """K_max where the user names none.

    Args:
        release: of vLLM.
        graphs: the engines capture CUDA graphs, and may for every arm.
    """
    return LONGEST if graphs and plan_for(release).runner == "V1" else LONGEST_WITHOUT_GRAPHS


def table() -> str:
    """The plans as a Markdown table, for the documentation."""
    lines = ["| vLLM | Runner | Arms | FULL graphs | Otherwise | Why |", "|---|---|---|---|---|---|"]
    for plan, following in zip(PLANS, (*PLANS[1:], None), strict=True):
        first = ".".join(map(str, plan.first))
        last = f"{following.first[0]}.{following.first[1] - 1}" if following else None
        releases = f"{first} and later" if last is None else first if last == first else f"{first} to {last}"
        arms = ", ".join(map(str, plan.arms))
        lines.append(f"| {releases} | {plan.runner} | {arms} | {plan.full} | {plan.fallback} | {plan.reason} |")
    return "\n".join(lines)


def token_limit(vllm_config: Any) -> int:
    """Tokens in the largest captured step, from vLLM's resolved config; 0 where nothing is captured."""
    compilation, width = vllm_config.compilation_config, 1 + vllm_config.num_speculative_tokens
    mode = getattr(compilation.cudagraph_mode, "name", "NONE")
    if vllm_config.model_config.enforce_eager or mode == "NONE":
        return 0
    return int(compilation.max_cudagraph_capture_size or 0) // width * width
