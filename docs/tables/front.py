"""What a reader sees first: the README's table, and the headline rows of docs/results.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tables.page import load, per_token, rows

TODAYS_CODE = "2026-11-28"
"""Files of results from before this day are of an older version (docs/results.md)."""
FIXED = r"vllm-(\d+)"
"""Names of arms with vLLM's own speculation at one K and a drafter that keeps its weights."""


def expectations() -> str:
    """A trained drafter of a language model with TLT, in vLLM alone at its best fixed K, and there as verl loses it.

    Arms that were not run have no row. What a job's start and end took, which no ratio includes, stands below.
    """
    arms = (
        ("TLT", "tlt"),
        ("vLLM's own speculation with K={}, in engines that never sleep", FIXED),
        ("vLLM's own speculation with K={} as verl runs it, whose drafter is lost at the first sleep", f"{FIXED}-lost"),
    )
    found, body = load("e2e_real"), []
    for name, pattern in arms:
        if arm := _best(found["ratios"], pattern):
            named = name.format(*re.findall(r"\d+", arm))
            body.append([named, per_token(found, arm, "rollout"), per_token(found, arm, "step")])
    stock_s, tlt_s = (found["left_out"][arm]["start_s"] for arm in ("stock", "tlt"))
    starts = (
        f"Not included: start and end of a job, which took {stock_s:.0f} s with stock verl and {tlt_s:.0f} s with TLT."
    )
    return f"{rows(('SmolLM2-135M, times as fast as stock verl', 'Rollout', 'Step'), body)}\n{starts}\n"


def headlines() -> str:
    """The rows of docs/results.md: question, answer, and the page that has the rest."""
    body = [
        [f"[{what}](../benchmarks/results/{page}){_age(file)}", found]
        for what, page, file, found in (
            ("Does training in idle time make a better drafter?", "drafter.md#training-along", "along", _along()),
            ("Is it lossless?", "robustness.md#is-it-lossless", "lossless_tlt", _lossless()),
            ("Jobs killed and resumed", "robustness.md#when-the-whole-job-is-killed", "resume", _resumed()),
        )
    ]
    return rows(("Question", "Found"), body)


def _age(file: str) -> str:
    """A remark where another spot trainer and another choice of K than today's were measured."""
    return " (older version)" if load(file)["machine"]["date"] < TODAYS_CODE else ""


def _best(ratios: Mapping[str, Any], pattern: str) -> str:
    """The arm of this kind of name with the fastest step; empty if there is none."""
    arms = [arm for arm in ratios if re.fullmatch(pattern, arm)]
    return max(arms, key=lambda arm: float(ratios[arm]["e2e_per_token"]["pooled"]), default="")


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
    rows_of_file = load("lossless_tlt")["rows"]
    found = [row for row in rows_of_file if row["setting"] != "structured output"]  # with which nothing is drafted
    tokens, wrong = (sum(row[key] for row in found) for key in ("tokens", "wrong_ends"))
    lowest = min(row[key] for row in found for key in ("p_places", "p_martingale"))
    return f"{tokens:,} tokens judged: lowest p of {2 * len(found)} tests {lowest:.2g}, {wrong} wrong ends of responses"


def _resumed() -> str:
    equal = [link["equal"] for link in load("resume")["links"] if "equal" in link]
    return f"{sum(equal)} of {len(equal)} resumed with policy, drafter and its optimizer of the same step"
