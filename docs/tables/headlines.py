"""What a reader sees first: the README's table, and the ten headline rows of docs/results.md."""

from __future__ import annotations

import re
from typing import Any

from tables.page import faster, load, rows

ROLLOUT, STEP = "rollout_per_token", "e2e_per_token"
FIXED = r"vllm-(\d+)"
"""Names of arms with vLLM's own speculation at one K and a drafter that keeps its weights."""
REGIMES = (
    ("a trained drafter: rollout", ROLLOUT, "tlt", FIXED),
    ("a trained drafter: whole step", STEP, "tlt", FIXED),
    ("a drafter whose weights are lost at every sleep, as in stock verl: rollout", ROLLOUT, "tlt", FIXED + "-lost"),
    ("a drafter that is kept and never trained: rollout", ROLLOUT, "tlt", FIXED + "-stale"),
    ("a random drafter, in its first steps: rollout", ROLLOUT, "tlt-fresh", FIXED + "-random"),
)
"""What a row says, which ratio it shows, TLT's arm, and the arms of which the fastest stands for a fixed K."""


def expectations() -> str:
    """TLT beside the fastest fixed K in every regime that `e2e.json` has; a random drafter may have no fixed K."""
    ratios = load("e2e")["ratios"]
    body = []
    for regime, what, own, pattern in REGIMES:
        arm = fastest(ratios, what, pattern)
        if arm or own == "tlt-fresh":
            fixed = f"{faster(ratios[arm][what])}, K={re.findall(FIXED, arm)[0]}" if arm else "not measured"
            body.append([regime, faster(ratios[own][what]), fixed, "1x"])
    return rows(("Regime", "TLT", "Best fixed K", "Stock verl"), body)


def fastest(ratios: dict[str, Any], what: str, pattern: str) -> str:
    """The arm of this kind of name with the highest ratio; empty if there is none."""
    arms = [arm for arm in ratios if re.fullmatch(pattern, arm)]
    return max(arms, key=lambda arm: float(ratios[arm][what]["pooled"]), default="")
