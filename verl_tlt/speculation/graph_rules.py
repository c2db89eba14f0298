"""Which CUDA graphs an engine has for which draft length, by vLLM release.

A captured graph saves the launch of hundreds of kernels per step, most of a small batch's time, so a draft length
without one looks dearer than it is. vLLM's V1 model runner captures FULL graphs for batches in which every request has
exactly 1 + K_max tokens, and PIECEWISE graphs (attention outside) by token count for everything else; counts are
rounded up to multiples of 1 + K_max, up to a largest one, beyond which a step runs eagerly. A test holds this, as
arithmetic, against vLLM's own dispatcher, whose text is the same in 0.24, 0.26 and 0.28.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FULL_GRAPHS = "TLT_FULL_GRAPHS"
"""Environment variable of the engines: 1 has `capture_every_arm` run. No setting, because no GPU has seen it."""


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


_V1_FULL = "the longest arm; with TLT_FULL_GRAPHS=1 every arm"
_V1_FALLBACK = "PIECEWISE, padded to a multiple of 1 + K_max; no arm is chosen whose step is above the largest graph"

PLANS = (
    GraphPlan(
        (0, 24), "V1", (0, 1, 3), _V1_FULL, _V1_FALLBACK,
        "The V2 runner of this release drafts K_max whatever is asked, and vLLM's own table of draft lengths would take"
        " the FULL graphs away altogether; 1, 2 and 4 tokens a request divide every captured size, and a longer K_max "
        "would pad K=0 to 8 tokens.",
    ),
    GraphPlan(
        (0, 26), "V1", (0, 1, 3, 7), _V1_FULL, _V1_FALLBACK,
        "As 0.24: V2 still drafts K_max, and with a table its capture fails for EAGLE (vLLM issue 48494). K=7 needs "
        "`max_draft_length=7`.",
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
