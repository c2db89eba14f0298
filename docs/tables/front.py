"""What a reader sees first: the README's table, and the headline rows of docs/results.md."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

from tables.page import faster, load, percent, recorded, rows

ROLLOUT, STEP = "rollout_per_token", "e2e_per_token"
FIXED = r"vllm-(\d+)"
"""Names of arms with vLLM's own speculation at one K and a drafter that keeps its weights."""
RESPONSES = {"small": 24, "large": 96}
"""Responses of an RL step, by the load that a file names (benchmarks/e2e/arms.py: prompts x samples)."""
PAPER = "1.21x to 2.12x"
"""Whole steps of 7B to 70B policies (arXiv 2511.16665, figure 11 and table 3, read in readers' transcriptions)."""


def expectations() -> str:
    """Whole steps against stock verl by what a run starts with, vLLM's best fixed K beside it."""
    body = [*_three("e2e_real", "SmolLM2-135M", "e2e_real_large"), *_three("e2e", "the toy", "e2e_large")]
    for file in ("cold_start", "cold_start_rule"):
        found = load(file)
        lead = found["ratios"]["tlt-fresh"]["lead"]
        last, seconds = lead["seconds"][-1]
        ahead = (
            f"ahead from step {lead['from_step']}"
            if lead["from_step"]
            else f"{-seconds:.0f} s behind after step {last}"
        )
        start = f"no drafter, {RESPONSES[found['load']]} responses a step"
        body.append([start, _step(file, "tlt-fresh"), f"{ahead}; one turn"])
    body.append(["the paper's own code on 8 to 64 H100", PAPER, "not ours; [two](https://github.com/mit-han-lab/"
                 "fastrl/issues/5) [users](https://github.com/mit-han-lab/fastrl/issues/7) saw no gain"])  # fmt: skip
    return rows(("Start", "Whole step, times as fast as stock verl", ""), body)


def _three(file: str, policy: str, large: str = "") -> list[list[str]]:
    """A trained drafter with TLT, in vLLM alone at its best fixed K, and there as verl's defaults lose it."""

    def row(start: str, arms: str, found: str = "") -> list[str]:
        arm, more = _best(file, arms), _best(large, arms) if recorded(large) else ""
        step = _step(file, arm) + (f"; with four times as many responses {_step(large, more)}" if more else "")
        return [start, step, f"rollout {faster(load(file)['ratios'][arm][ROLLOUT])}{found}"]

    return [
        row(f"**{policy}, a trained drafter**", "tlt"),
        row("the same drafter in vLLM alone: its best fixed K, engines that never sleep", FIXED,
            f"; **TLT was {_verdict(STEP, file)}**"),
        row("the same in vLLM alone, as verl runs it: sleep drops the drafter", f"{FIXED}-lost"),
    ]  # fmt: skip


def _verdict(what: str, file: str = "e2e") -> str:
    """Whether TLT's interval leaves out the best fixed K, in words."""
    ratios = load(file)["ratios"]
    of, fixed = ratios["tlt"][what], ratios[_best(file, what=what)][what]["pooled"]
    return "slower" if of["high"] < fixed else "faster" if of["low"] > fixed else "not seen to be faster"


def _step(file: str, arm: str) -> str:
    return faster(load(file)["ratios"][arm][STEP])


def _best(file: str, pattern: str = FIXED, what: str = STEP) -> str:
    return fastest(load(file)["ratios"], what, pattern)


def fastest(ratios: dict[str, Any], what: str, pattern: str) -> str:
    """The arm of this kind of name with the highest ratio; empty if there is none."""
    arms = [arm for arm in ratios if re.fullmatch(pattern, arm)]
    return max(arms, key=lambda arm: float(ratios[arm][what]["pooled"]), default="")


def headlines() -> str:
    """The rows of docs/results.md, what TLT does not win first: question, answer, and the page that has the rest."""
    drafter, k = "drafter.md#training-along", "draft-length.md#when-everything-changes"
    real = "runs.md#the-language-model-under-grpo"
    body = [
        [f"[{what}](../benchmarks/results/{page})", found]
        for what, page, found in (
            *_drained(),
            ("SmolLM2-135M: TLT with a trained drafter", real, _speed("tlt", "e2e_real")),
            ("SmolLM2-135M: vLLM's best fixed K that keeps it", real, _best_fixed()),
            ("TLT against vLLM's best fixed K that keeps its drafter", "runs.md#end-to-end", _over_fixed()),
            ("TLT without a drafter and with few responses", "runs.md#what-a-cold-start-costs-and-when-it-has-paid",
             f"whole step {_step('cold_start_rule', 'tlt-fresh')} as fast as stock verl's, one turn"),
            ("K chosen with a trained drafter, against the best fixed K", k, _changing("trained")),
            ("Training an in-domain drafter along", drafter, _along(("in_domain",))),
            ("Seconds saved, estimated", "runs.md#is-tltsaved_estimate_s-right", _saved()),
            ("The toy: TLT with a trained drafter", "runs.md#end-to-end", _speed("tlt", "e2e")),
            ("Is it lossless?", "lossless.md#is-it-lossless", _lossless()),
            ("Training a random or a generic drafter along", drafter, _along(("random", "generic"))),
            ("K chosen, against an oracle", "draft-length.md#draft-length-against-oracles", _oracle()),
            ("K chosen from an untrained drafter on", k, _changing("all")),
            ("What an engine step waits for K", "draft-length.md#what-control-costs", _wait()),
            ("Jobs killed and resumed", "robustness.md#when-the-whole-job-is-killed", _resumed()),
        )
    ]  # fmt: skip
    return rows(("Question", "Found"), body)


def _drained() -> list[tuple[str, str, str]]:
    """Adaptive draft lengths of a language model against each fixed K and none; nothing where none was raced."""
    question = "K chosen while a language model's batch drains"
    found = []
    for text, of in (load("race")["loads"] if recorded("race") else {}).items():
        best = min(ratio for arm, ratio in of["over"].items() if arm.startswith("vllm-k"))
        ratios = ("{:.2f}x ({:.2f} to {:.2f})".format(*ratio) for ratio in (best, of["over"]["off"]))
        found.append("`{}`: {} as fast as the best fixed K, {} as no drafts".format(text, *ratios))
    link = "draft-length.md#a-drain-with-each-k-and-with-adaptive-drafts"
    return [(question, link, "; ".join(found))] if found else []


def _over_fixed() -> str:
    """Both ratios in every benchmark that has a fixed K whose drafter keeps its weights."""
    shown, verdicts = [], set()
    files = [*filter(recorded, ("e2e_real", "e2e_real_large", "e2e", "e2e_large", "e2e_stale", "e2e_avx2"))]
    for name, what in (("rollout", ROLLOUT), ("whole step", STEP)):
        found = []
        for file in files:
            ratios = load(file)["ratios"]
            of = ratios["tlt"][what]["pooled"] / ratios[_best(file, what=what)][what]["pooled"]
            found.append(f"{of:.2f}x")
            verdicts.add(_verdict(what, file))
        shown.append(f"{name} {', '.join(found)}")
    return f"in {len(files)} benchmarks, SmolLM2's first: {'; '.join(shown)}: {' or '.join(sorted(verdicts))}"


def _speed(arm: str, file: str) -> str:
    of = load(file)["ratios"][arm]
    return f"rollout {faster(of[ROLLOUT])}, whole step {faster(of[STEP])}, against stock"


def _best_fixed() -> str:
    ratios = load("e2e_real")["ratios"]
    best = {what: fastest(ratios, what, FIXED) for what in (ROLLOUT, STEP)}
    shown = [f"{faster(ratios[arm][what])} with K={re.findall(FIXED, arm)[0]}" for what, arm in best.items()]
    return f"rollout {shown[0]}, whole step {shown[1]}, against stock"


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


def _along(starts: tuple[str, ...]) -> str:
    gains = []
    for start in starts:
        gain = load("drafter_study")["summary"][start]["online_vs_frozen_accept_length_late"]
        shown = [percent(gain[key], int(abs(gain["mean"]) < 0.1)) for key in ("mean", "low", "high")]
        gains.append("{} % ({} to {} %)".format(*shown) + f" ({start})" * (len(starts) > 1))
    return f"accept length late in a run: {', '.join(gains)} against leaving it"


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


def _changing(stage: str) -> str:
    over = {name: stages[stage] for name, stages in load("control")["changing"]["goodput_is_faster_than"].items()}
    fixed = min((of for name, of in over.items() if name.startswith("fixed-")), key=lambda of: float(of[0]))
    shown = ["{:.2f}x ({:.2f} to {:.2f})".format(*of) for of in (fixed, over["table"])]
    lead = "; the lead is made while the drafter is weak and OFF" if stage == "all" else ""
    return f"{shown[0]} as fast as the best fixed K, {shown[1]} as vLLM's table{lead}"


def _wait() -> str:
    control = load("control")
    wait, own = control["overhead_us_p50"], control["vllm_us_p50"]
    return f"{wait:.0f} µs at 256 requests, {100 * wait / own:.1f} % of what vLLM's own scheduler takes"


def _resumed() -> str:
    equal = [link["equal"] for link in load("resume")["links"] if "equal" in link]
    return f"{sum(equal)} of {len(equal)} went on from one and the same step, drafter and optimizer included"
