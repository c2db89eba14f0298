"""Tables about whole runs against stock verl."""

from __future__ import annotations

import re
from statistics import mean
from typing import Any

from tables.page import faster, load, recorded, rows


def end_to_end() -> str:
    """All arms against stock, on cores with bfloat16 products."""
    return _end_to_end("e2e")


def end_to_end_avx2() -> str:
    """The same on cores with AVX2 alone."""
    return _end_to_end("e2e_avx2")


def end_to_end_large() -> str:
    """The same with four times as many responses a step."""
    return _further("e2e_large")


def end_to_end_stale() -> str:
    """The same with a drafter that was made for an earlier policy."""
    return _further("e2e_stale")


def end_to_end_real() -> str:
    """The same of a language model."""
    return _further("e2e_real")


def end_to_end_real_large() -> str:
    """The same with four times as many responses in a step."""
    return _further("e2e_real_large")


def _further(name: str) -> str:
    if not recorded(name):
        return "Not recorded yet.\n"
    found = load(name)
    beside = next(said for said in found["sentences"] if "the fastest of the others" in said)
    file = f"[{name}.json]({name}.json), {found['machine']['date'][:10]}"
    return f"{file}:\n\n{_end_to_end(name)}\n{beside}\n"


def _of_all(part: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(recording, name, what it says) of all arms or drafters of the recordings of the benchmark."""
    files = [file for file in ("e2e", "e2e_stale") if recorded(file)]
    return [(file, name, of) for file in files for name, of in load(file).get(part, {}).items()]


def arms() -> str:
    """Every arm of the benchmark in words."""
    labels = {name: of.get("label") or ARMS[name] for _, name, of in _of_all("arms")}
    return rows(("Arm", "Is"), [[f"`{name}`", label] for name, label in labels.items()])


ARMS = {
    "stock": "stock verl, no speculation",
    **{f"vllm-{k}": f"vLLM's own speculation, K={k}, with the trained drafter" for k in (1, 3, 7)},
    "vllm-table": "vLLM's own speculation, K by batch from a table of measured costs, with the trained drafter",
    "tlt": "TLT from the trained drafter, trained on in idle time",
    "tlt-no-spot": "TLT from the trained drafter, which it does not train",
    "tlt-ngram": "TLT with n-grams in a drafter's place",
    "tlt-fresh": "TLT from a random drafter, trained in idle time",
}
"""Arms of recordings that do not say what they are."""


def drafters() -> str:
    """How the drafters of the benchmark were made, and what they reach."""
    body = []
    for file, name, of in _of_all("drafters"):
        table = " (of the table with a stale one)" if file == "e2e_stale" and name == "warm" else ""
        took = f"{of['cpu_seconds'] / 60:.0f} minutes of one core" if "cpu_seconds" in of else ""
        reaches = f"{of['accept_length']:.2f} simulated, {of['accept_length_served']:.2f} served" if took else ""
        if "accept_length_bench" in of:
            bench, moved = of["accept_length_bench"], of["kl_per_token"]
            reaches += f"; {bench:.2f} served with the bench's policy, which is {moved:.2f} nats a token away"
        body.append([f"{name}{table}: {of.get('policy', '')}".rstrip(": "), f"`{of['made_by']}`", took, reaches])
    return rows(("Drafter", "Made by", "In", "Accept length on held-out prompts, K=7"), body)


def _end_to_end(file: str) -> str:
    found = load(file)

    def outside(name: str) -> str:
        steps = [step for turn in found["turns"] if turn["arm"] == name for step in turn["steps"]]
        spent = sum(step["step_s"] - step["rollout_s"] for step in steps)
        return f"{1000 * spent / sum(step['tokens'] for step in steps):.1f} s"

    body = []
    for name, of in found["ratios"].items():
        arm = found["arms"][name]
        cells = [faster(of[key]) for key in ("rollout_per_token", "e2e_per_token")]
        accepted = f"{arm['accept_length']:.2f}" if arm["accept_length"] else ""
        body.append([f"`{name}`", *cells, outside(name), accepted, f"{mean(arm['reward']):.2f}"])
    stock = found["arms"]["stock"]
    body.append(["`stock`", "", "", outside("stock"), "", f"{mean(stock['reward']):.2f}"])
    head = ("", "rollout", "step", "outside rollout, per 1,000 tokens", "accept length", "reward")
    return rows(head, body)


def cold_start() -> str:
    """When a run without a drafter has made up for its cold start, beside one with a trained drafter."""
    return _cold_start("cold_start")


def cold_start_small() -> str:
    """The same with a quarter of the responses."""
    return _cold_start("cold_start_small")


def cold_start_rule() -> str:
    """The same as a user's run is, whose own rule gives so short a one no cold start."""
    return _cold_start("cold_start_rule")


def cold_start_turns() -> str:
    """The same in turns of eight steps, beside an arm that does not train either."""
    return _cold_start("cold_start_turns")


def _cold_start(file: str) -> str:
    found = load(file)
    body = []
    for name, of in found["ratios"].items():
        steps = [step for turn in found["turns"] if turn["arm"] == name for step in turn["steps"]]
        (low_at, low), (last, end) = min(of["lead"]["seconds"], key=lambda row: row[1]), of["lead"]["seconds"][-1]
        cold, at = max((step["cold_start_s"] or 0.0, step["step"]) for step in steps)
        lengths = f"{steps[0]['accept_length']:.2f} to {steps[-1]['accept_length']:.2f}"
        stop, behind = f"{cold:.1f} s in step {at}" if cold else "", f"{-low:.0f} s, step {low_at}" if low < 0 else ""
        ahead = f"step {of['lead']['from_step']}" if of["lead"]["from_step"] else "not yet"
        body.append([f"`{name}`", stop, lengths, faster(of["e2e"]), behind, ahead, f"{end:+.0f} s, step {last}"])
    on = f"[{file}.json]({file}.json), {found['machine']['date'][:10]}:\n\n"
    head = ("", "cold start", "accept length", "step", "furthest behind stock", "ahead from", "ahead at the end")
    return on + rows(head, body)


def readings() -> str:
    """What the rows of the end-to-end benchmark say besides: TLT beside the fastest K, and how far steps scatter."""
    runs = (load("e2e"), load("e2e_avx2"))
    body = [
        [
            "`tlt` over the best fixed K: rollout, per token",
            *(_over_fixed(run, "rollout_per_token") for run in runs),
        ],
        ["the same, whole step", *(_over_fixed(run, "e2e_per_token") for run in runs)],
    ]
    for arm in ("tlt", "tlt-fresh"):
        each = [run["ratios"][arm]["e2e_per_token"]["each"] for run in runs]
        spread = [f"{min(steps):.2f}x to {max(steps):.2f}x" for steps in each]
        body.append([f"single steps of `{arm}` over stock's of the same number, per token", *spread])
    own = [" / ".join(_own_work(run, arm) for arm in ("tlt", "tlt-fresh", "tlt-no-spot")) for run in runs]
    body.append(["TLT's own work on the critical path: `tlt` / `tlt-fresh` / `tlt-no-spot`", *own])
    rewards = [{name: mean(arm["reward"]) for name, arm in run["arms"].items()} for run in runs]
    apart = [[reward - of["stock"] for name, reward in of.items() if name != "stock"] for of in rewards]
    body.append(["reward less stock's, over all arms", *(f"{min(of):+.2f} to {max(of):+.2f}" for of in apart)])
    return rows(("", "bfloat16", "AVX2"), body)


def _over_fixed(run: Any, what: str) -> str:
    fixed = [of[what]["pooled"] for arm, of in run["ratios"].items() if re.fullmatch(r"vllm-\d+", arm)]
    return f"{run['ratios']['tlt'][what]['pooled'] / max(fixed):.2f}x"


def _own_work(run: Any, arm: str) -> str:
    steps = [step for turn in run["turns"] if turn["arm"] == arm for step in turn["steps"]]
    if not steps:
        return "-"
    return f"{100 * sum(step['overhead_s'] for step in steps) / sum(step['step_s'] for step in steps):.1f} %"


def claim(saved: dict[str, float]) -> list[str]:
    """Cells: the savings by the account, those measured, and the difference."""

    def with_range(value: float, of: str) -> str:
        return f"{value:.1f} s ({saved[f'{of}_low_s']:.1f} to {saved[f'{of}_high_s']:.1f})"

    claimed, measured = saved["claimed_s"], saved["measured_s"]
    return [f"{claimed:.1f} s", with_range(measured, "measured"), with_range(claimed - measured, "error")]


def savings() -> str:
    """Savings by the account and measured, on cores with bfloat16 products."""
    return _savings("e2e_forced")


def savings_avx2() -> str:
    """The same on cores with AVX2 alone."""
    return _savings("e2e_forced_avx2")


def _savings(file: str) -> str:
    found: dict[str, Any] = load(file)
    body = []
    steps = {
        name: {(turn["turn"], step["step"]): step for turn in found["turns"] if turn["arm"] == name
               for step in turn["steps"]} for name in found["arms"]
    }  # fmt: skip
    for name, of in found["ratios"].items():
        saved, arm = of["saved"], found["arms"][name]
        claims = claim(saved) if saved else [""] * 3
        speeds = [faster(of[key]) for key in ("rollout", "e2e")]
        own, stock = steps[name], [step for key, step in steps["stock"].items() if key in steps[name]]
        outside = [sum(s["step_s"] - s["rollout_s"] for s in some) / len(some) for some in (own.values(), stock)]
        share = sum(s["overhead_s"] for s in own.values()) / sum(s["step_s"] for s in own.values())
        lengths = f"{arm['accept_length']:.2f} / {arm['accept_length_tail']:.2f}"
        outside_cells = [f"{outside[0]:.1f} / {outside[1]:.1f} s", f"{100 * share:.1f} %"]
        off = of.get("rollout_off")
        undrafted = f"{len(off['each'])}: {faster(off)}" if off else ""
        body.append([f"`{name}`", lengths, *speeds, undrafted, *claims, *outside_cells])
    return rows(
        ("", "accept length: all / the longest tenth", "rollout", "step", "rollouts without drafts",
         "`tlt/saved_estimate_s` claimed",
         "shorter than stock's by", "claimed too much", "outside rollout, a step: TLT / stock",
         "`tlt/overhead_s` of the step"), body,
    )  # fmt: skip


def same_tokens() -> str:
    """Step by step, both pairs."""
    found = load("same_tokens")

    def of(step: dict[str, float]) -> list[str]:
        return [
            f"{step['stock_rollout_s']:.1f} s",
            f"{step['rollout_s']:.1f} s",
            f"{step['accept_length']:.2f}",
            f"{step['rollout_ratio']:.2f}x",
        ]

    both = zip(found["fresh"]["steps"], found["warm"]["steps"], strict=True)
    body = [[fresh["step"], *of(fresh), *of(warm)] for fresh, warm in both]
    medians = [f"{found[name]['rollout_ratio']['median']:.2f}x" for name in ("fresh", "warm")]
    head = [
        "step",
        *("stock", "from scratch", "accept length", "ratio"),
        *("stock", "trained", "accept length", "ratio"),
    ]
    return rows(head, [*body, ["median", "", "", "", medians[0], "", "", "", medians[1]]])
