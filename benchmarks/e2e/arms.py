"""What the toy's benchmark compares: stock verl, vLLM's own speculation, and TLT with and without its parts.

Those of vLLM take the drafter that `tlt` starts from, and `vllm-table` the draft lengths that are best by the same
measured step costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_tlt.compare.arms import NO_SPOT, TLT, Arm, named_arms, vllm_arm

VLLM_LENGTHS = (1, 3, 7)
LONGEST = VLLM_LENGTHS[-1]


def arms(drafter: Path, schedule: Sequence[Sequence[int]], costs: Path) -> dict[str, Arm]:
    """All nine by name, `stock` first.

    Args:
        drafter: the trained one.
        schedule: of `vllm-table`.
        costs: folder of measured step costs, of which every arm with TLT starts.
    """
    of_tlt = (f"tlt.speculation.costs_dir={costs}", f"tlt.speculation.max_draft_length={LONGEST}")
    names = [*(f"vllm-{k}" for k in VLLM_LENGTHS), NO_SPOT, TLT]
    found = {arm.name: arm for arm in named_arms(names, str(drafter))}
    extra = [
        vllm_arm("vllm-table", "vLLM's own speculation, K by batch", str(drafter), LONGEST, schedule),
        Arm("tlt-ngram", "verl-tlt with n-grams", True, ("tlt.speculation.source=ngram", "tlt.spot.enable=false")),
        Arm("tlt-fresh", "verl-tlt from a random drafter", True),
    ]
    every = [*found.values(), *extra]
    return {arm.name: replace(arm, overrides=(*arm.overrides, *of_tlt)) if arm.tlt else arm for arm in every}
