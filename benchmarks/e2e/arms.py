"""What is compared: stock verl, stock verl with vLLM's own speculation, and TLT with and without its parts.

Each arm is a command line of its own: the demo's recipe, `+tlt=default` or not, and these overrides. Those of vLLM take
the drafter that `tlt` starts from, and `vllm-table` the draft lengths that are best by the same measured step costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STOCK = "stock"
VLLM_LENGTHS = (1, 3, 7)
LONGEST = VLLM_LENGTHS[-1]
SPECULATIVE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"


@dataclass(frozen=True)
class Arm:
    """One way to run the recipe."""

    name: str
    tlt: bool
    drafter: Path | None = None
    """What TLT starts from."""
    overrides: tuple[str, ...] = ()


def speculative_config(drafter: Path, longest: int, schedule: Sequence[Sequence[int]] = ()) -> str:
    """The override that gives stock verl's engines vLLM's own speculation.

    Args:
        drafter: an EAGLE-3 drafter; its weights are read from its file, though verl fills the policy's in later.
        longest: `num_speculative_tokens`.
        schedule: rows of `num_speculative_tokens_per_batch_size`; none: always `longest`.
    """
    table = f",num_speculative_tokens_per_batch_size:{[list(row) for row in schedule]}" if schedule else ""
    return (
        f"{SPECULATIVE}={{method:eagle3,model:{drafter},num_speculative_tokens:{longest},"
        f"draft_load_config:{{load_format:auto}}{table}}}"
    )


def arms(drafter: Path, schedule: Sequence[Sequence[int]], costs: Path) -> dict[str, Arm]:
    """All nine by name, `stock` first.

    Args:
        drafter: the trained one.
        schedule: of `vllm-table`.
        costs: folder of measured step costs, of which every arm with TLT starts.
    """
    of_tlt = (f"tlt.speculation.costs_dir={costs}", f"tlt.speculation.max_draft_length={LONGEST}")
    found = [Arm(STOCK, tlt=False)]
    found += [Arm(f"vllm-{k}", tlt=False, overrides=(speculative_config(drafter, k),)) for k in VLLM_LENGTHS]
    found += [
        Arm("vllm-table", tlt=False, overrides=(speculative_config(drafter, LONGEST, schedule),)),
        Arm("tlt-no-spot", tlt=True, drafter=drafter, overrides=(*of_tlt, "tlt.spot.enable=false")),
        Arm("tlt-ngram", tlt=True, overrides=(*of_tlt, "tlt.speculation.source=ngram", "tlt.spot.enable=false")),
        Arm("tlt-fresh", tlt=True, overrides=of_tlt),
        Arm("tlt", tlt=True, drafter=drafter, overrides=of_tlt),
    ]
    return {arm.name: arm for arm in found}
