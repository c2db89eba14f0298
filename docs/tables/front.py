"""What a reader sees first: the README's table, and the ten headline rows of docs/results.md."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

from tables.page import faster, load, percent, recorded, rows

ROLLOUT, STEP = "rollout_per_token", "e2e_per_token"
FIXED = r"vllm-(\d+)"
"""Names of arms with vLLM's own speculation at one K and a drafter that keeps its weights."""
REGIMES = (
    ("both with a trained drafter: rollout", "e2e", ROLLOUT, "tlt", FIXED),
    ("the same: whole step", "e2e", STEP, "tlt", FIXED),
    ("the same with four times as many responses a step: rollout", "e2e_large", ROLLOUT, "tlt", FIXED),
    ("fixed K loses its drafter in sleep, as by verl's defaults: rollout", "e2e", ROLLOUT, "tlt", FIXED + "-lost"),
    ("fixed K with a drafter of an earlier policy: rollout", "e2e_stale", ROLLOUT, "tlt", FIXED + "-stale"),
    ("both from a random drafter, first steps: rollout", "e2e", ROLLOUT, "tlt-fresh", FIXED + "-random"),
)
"""What a row says, its file and ratio, TLT's arm, and the arms of which the fastest stands for a fixed K."""


def expectations() -> str:
    """TLT beside the fastest fixed K in every regime that was measured; a random drafter may have no fixed K."""
    body = []
    for regime, file, what, own, pattern in REGIMES:
        ratios = load(file)["ratios"] if recorded(file) else {}
        arm = fastest(ratios, what, pattern)
        if arm or (ratios and own == "tlt-fresh"):
            fixed = f"{faster(ratios[arm][what])}, K={re.findall(FIXED, arm)[0]}" if arm else "not measured"
            body.append([regime, faster(ratios[own][what]), fixed, "1x"])
    return rows(("Regime", "TLT", "Best fixed K", "Stock verl"), body)


def fastest(ratios: dict[str, Any], what: str, pattern: str) -> str:
    """The arm of this kind of name with the highest ratio; empty if there is none."""
    arms = [arm for arm in ratios if re.fullmatch(pattern, arm)]
    return max(arms, key=lambda arm: float(ratios[arm][what]["pooled"]), default="")


def headlines() -> str:
    """The ten rows of docs/results.md: what was asked, what came out, and the page that has the rest."""
    body = [
        [f"[{what}](../benchmarks/results/{page})", found]
        for what, page, found in (
            ("TLT with a trained drafter, against stock verl", "runs.md#end-to-end", _speed("tlt")),
            ("vLLM's own speculation at its best fixed K, likewise", "runs.md#end-to-end", _best_fixed()),
            ("TLT from a random drafter, in its first steps", "runs.md#end-to-end", _speed("tlt-fresh")),
            ("Seconds saved, as TLT estimates them", "runs.md#is-tltsaved_s-right", _saved()),
            ("Is it lossless?", "lossless.md#is-it-lossless", _lossless()),
            ("Training the drafter along, against leaving it", "drafter.md#training-along", _along()),
            ("K chosen, against an oracle", "draft-length.md#draft-length-against-oracles", _oracle()),
            ("K chosen while drafter, policy and load change", "draft-length.md#when-everything-changes", _changing()),
            ("What an engine step waits for K", "draft-length.md#what-control-costs", _wait()),
            ("Jobs killed at a random moment and resumed", "robustness.md#when-the-whole-job-is-killed", _resumed()),
        )
    ]
    return rows(("Question", "Found"), body)


def _speed(arm: str) -> str:
    of = load("e2e")["ratios"][arm]
    return f"rollout {faster(of[ROLLOUT])}, whole step {faster(of[STEP])}, per token"


def _best_fixed() -> str:
    ratios = load("e2e")["ratios"]
    best = {what: fastest(ratios, what, FIXED) for what in (ROLLOUT, STEP)}
    shown = [f"{faster(ratios[arm][what])} with K={re.findall(FIXED, arm)[0]}" for what, arm in best.items()]
    return f"rollout {shown[0]}, whole step {shown[1]}, per token; its drafter keeps its weights here"


def _saved() -> str:
    shown = []
    for file in ("e2e_forced", "e2e_forced_avx2"):
        saved = load(file)["ratios"]["tlt"]["saved"]
        measured = f"{saved['measured_s']:.1f} s ({saved['measured_low_s']:.1f} to {saved['measured_high_s']:.1f})"
        shown.append(f"estimated {saved['claimed_s']:.1f} s, measured {measured}")
    return f"{shown[0]}; by an older commit, with AVX2: {shown[1]}"


def _lossless() -> str:
    found = load("lossless_tlt")["rows"]
    tokens, wrong = (sum(row[key] for row in found) for key in ("tokens", "wrong_ends"))
    lowest = min(row[key] for row in found for key in ("p_places", "p_martingale"))
    return f"{tokens:,} tokens judged: lowest p of {2 * len(found)} tests {lowest:.2g}, {wrong} wrong ends of responses"


def _along() -> str:
    summary, gains = load("drafter_study")["summary"], []
    for start, name in {"random": "random", "generic": "generic", "in_domain": "in-domain"}.items():
        gain = summary[start]["online_vs_frozen_accept_length_late"]["mean"]
        gains.append(f"{percent(gain, int(abs(gain) < 0.1))} % ({name} drafter)")
    return f"accept length late in a run: {', '.join(gains)}"


def _oracle() -> str:
    control = load("control")
    formula = [
        score["pct_of_oracle"] for replay in control["replay"]
        for score in (
            replay["policies"]["goodput"], *control["replay_detail"][replay["name"]]["goodput_other_seeds"]
        )
    ]  # fmt: skip
    odd = [replay["pct_of_oracle"]["goodput"] for replay in control["foreign"]]
    shown = [f"{median(found):.1f} % of its speed ({min(found):.1f} % at worst)" for found in (formula, odd)]
    return f"simulated: {shown[0]} in {len(formula)} runs; {shown[1]} in {len(odd)} whose costs follow no formula"


def _changing() -> str:
    over = {name: stages["all"] for name, stages in load("control")["changing"]["goodput_is_faster_than"].items()}
    fixed = min((of for name, of in over.items() if name.startswith("fixed-")), key=lambda of: float(of[0]))
    shown = ["{:.2f}x ({:.2f} to {:.2f})".format(*of) for of in (fixed, over["table"])]
    return f"{shown[0]} as fast as the best fixed K, {shown[1]} as vLLM's table"


def _wait() -> str:
    control = load("control")
    wait, own = control["overhead_us_p50"], control["vllm_us_p50"]
    return f"{wait:.0f} µs at 256 requests, {100 * wait / own:.1f} % of what vLLM's own scheduler takes"


def _resumed() -> str:
    equal = [link["equal"] for link in load("resume")["links"] if "equal" in link]
    return f"{sum(equal)} of {len(equal)} went on from one and the same step, drafter and optimizer included"
