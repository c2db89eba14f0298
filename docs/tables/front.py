"""What a reader sees first: the README's table, and the headline rows of docs/results.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tables.page import load, per_token, rows

TODAYS_CODE = "2026-11-28"
"""Files of results from before this day are of an older version (docs/results.md)."""
ROLLOUT, STEP = "rollout", "step"
FIXED = r"vllm-(\d+)"
"""Names of arms with vLLM's own speculation at one K and a drafter that keeps its weights."""
LOST = "vllm-3-lost"
"""The arm whose engines lose the drafter when they sleep."""


def expectations() -> str:
    """A trained drafter of a language model with TLT, in vLLM alone at its best fixed K, and there as verl loses it.

    Arms that were not run have no row.
    """
    arms = (
        ("TLT", "tlt"),
        ("vLLM's own speculation with K={}, in engines that never sleep", FIXED),
        ("vLLM's own speculation with K={} as verl runs it, whose drafter is lost at the first sleep", f"{FIXED}-lost"),
    )
    body = []
    for name, pattern in arms:
        if arm := _best("e2e_real", pattern):
            named = name.format(*re.findall(r"\d+", arm))
            body.append([named, _ratio("e2e_real", arm, ROLLOUT), _ratio("e2e_real", arm, STEP)])
    return rows(("SmolLM2-135M, times as fast as stock verl", "Rollout", "Step"), body)


def headlines() -> str:
    """The rows of docs/results.md: question, answer, and the page that has the rest."""
    cold = "runs.md#what-a-cold-start-costs-and-when-it-has-paid"
    saved = "runs.md#is-tltsaved_estimate_s-right"
    best = _best("e2e", FIXED).removeprefix("vllm-")
    fixed = f"The same with vLLM at K={best}, the fixed K with the fastest step, in engines that never sleep"
    body = [
        [f"[{what}](../benchmarks/results/{page}){_age(file)}", found]
        for what, page, file, found in (
            ("The toy policy with a trained drafter: TLT", "runs.md#end-to-end", "e2e", _speed("tlt")),
            (fixed, "runs.md#end-to-end", "", _speed(FIXED)),
            ("The same at K=3 with verl's defaults, which lose the drafter", "runs.md#end-to-end", "", _speed(LOST)),
            ("A run without a drafter, 96 responses a step", cold, "cold_start", _cold("cold_start")),
            ("Seconds saved, by the estimate and measured", saved, "e2e_forced", _saved()),
            ("Does training in idle time make a better drafter?", "drafter.md#training-along", "along", _along()),
            ("Is it lossless?", "robustness.md#is-it-lossless", "lossless_tlt", _lossless()),
            ("Jobs killed and resumed", "robustness.md#when-the-whole-job-is-killed", "resume", _resumed()),
        )
    ]  # fmt: skip
    return rows(("Question", "Found"), body)


def _age(file: str) -> str:
    """A remark where another spot trainer and another choice of K than today's were measured; no file: no verl-tlt."""
    return " (older version)" if file and load(file)["machine"]["date"] < TODAYS_CODE else ""


def _ratio(file: str, arm: str, what: str) -> str:
    return per_token(load(file), arm, what)


def _best(file: str, pattern: str) -> str:
    """The arm of this kind of name with the fastest step; empty if there is none."""
    ratios: dict[str, Any] = load(file)["ratios"]
    arms = [arm for arm in ratios if re.fullmatch(pattern, arm)]
    return max(arms, key=lambda arm: float(ratios[arm]["e2e_per_token"]["pooled"]), default="")


def _speed(pattern: str) -> str:
    arm = _best("e2e", pattern)
    return f"rollout {_ratio('e2e', arm, ROLLOUT)}, step {_ratio('e2e', arm, STEP)}"


def _cold(file: str) -> str:
    lead = load(file)["ratios"]["tlt-fresh"]["lead"]
    last, seconds = lead["seconds"][-1]
    ahead = f"ahead of stock verl from step {lead['from_step']} on" if lead["from_step"] else "behind stock verl"
    return f"step {_ratio(file, 'tlt-fresh', STEP)}; {ahead}, {abs(seconds):.0f} s after step {last}; one run"


def _saved() -> str:
    saved = load("e2e_forced")["ratios"]["tlt"]["saved"]
    low, high = saved["measured_low_s"], saved["measured_high_s"]
    return f"estimated {saved['claimed_s']:.1f} s, measured {saved['measured_s']:.1f} s ({low:.1f} to {high:.1f})"


def _along() -> str:
    runs = [load(name) for name in ("along", "along_1")]

    def rise(served: Mapping[str, Any]) -> str:
        policy = "policy after the run"
        first, last = (served[f"{policy}, head {when} the run"]["accept_length"] for when in ("before", "after"))
        return f"{first:.2f} to {last:.2f}"

    (steps,) = {len(found["steps"]) + 1 for found in runs}
    rises = " and ".join(rise(found["served"]) for found in runs)
    return f"accept length {rises} in two runs of {steps} steps, at K=5; SmolLM2-135M"


def _lossless() -> str:
    found = load("lossless_tlt")["rows"]
    tokens, wrong = (sum(row[key] for row in found) for key in ("tokens", "wrong_ends"))
    lowest = min(row[key] for row in found for key in ("p_places", "p_martingale"))
    return f"{tokens:,} tokens judged: lowest p of {2 * len(found)} tests {lowest:.2g}, {wrong} wrong ends of responses"


def _resumed() -> str:
    equal = [link["equal"] for link in load("resume")["links"] if "equal" in link]
    return f"{sum(equal)} of {len(equal)} resumed with policy, drafter and its optimizer of the same step"
