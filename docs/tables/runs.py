"""Tables about whole runs against stock verl."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from tables.page import load, percent, rows


def end_to_end() -> str:
    """All arms against stock, on cores with bfloat16 products."""
    return _end_to_end("e2e")


def end_to_end_avx2() -> str:
    """The same on cores with AVX2 alone."""
    return _end_to_end("e2e_avx2")


def _end_to_end(file: str) -> str:
    found = load(file)

    def outside(name: str) -> str:
        steps = [step for turn in found["turns"] if turn["arm"] == name for step in turn["steps"]]
        spent = sum(step["step_s"] - step["rollout_s"] for step in steps)
        return f"{1000 * spent / sum(step['tokens'] for step in steps):.1f} s"

    body = []
    for name, of in found["ratios"].items():
        arm, cells = found["arms"][name], []
        for key in ("rollout", "rollout_per_token", "e2e", "e2e_per_token"):
            cells.append(f"{of[key]['pooled']:.2f}x ({of[key]['low']:.2f} to {of[key]['high']:.2f})")
        accepted = f"{arm['accept_length']:.2f}" if arm["accept_length"] else ""
        body.append([f"`{name}`", *cells, outside(name), accepted, f"{mean(arm['reward']):.2f}"])
    stock = found["arms"]["stock"]
    body.append(["`stock`", *[""] * 4, outside("stock"), "", f"{mean(stock['reward']):.2f}"])
    head = (
        "",
        "rollout",
        "per token",
        "step",
        "per token",
        "outside rollout, per 1,000 tokens",
        "accept length",
        "reward",
    )
    return rows(head, body)


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
        speeds = [f"{of[k]['pooled']:.2f}x ({of[k]['low']:.2f} to {of[k]['high']:.2f})" for k in ("rollout", "e2e")]
        own, stock = steps[name], [step for key, step in steps["stock"].items() if key in steps[name]]
        outside = [sum(s["step_s"] - s["rollout_s"] for s in some) / len(some) for some in (own.values(), stock)]
        share = sum(s["overhead_s"] for s in own.values()) / sum(s["step_s"] for s in own.values())
        lengths = f"{arm['accept_length']:.2f} / {arm['accept_length_tail']:.2f}"
        outside_cells = [f"{outside[0]:.1f} / {outside[1]:.1f} s", f"{100 * share:.1f} %"]
        off = of.get("rollout_off")
        undrafted = f"{len(off['each'])}: {off['pooled']:.2f}x ({off['low']:.2f} to {off['high']:.2f})" if off else ""
        body.append([f"`{name}`", lengths, *speeds, undrafted, *claims, *outside_cells])
    return rows(
        ("", "accept length: all / the longest tenth", "rollout", "step", "rollouts without drafts",
         "`tlt/saved_s` claimed",
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


def expectations() -> str:
    """The README's table: runs on the CPU."""
    both, control = (load("e2e"), load("e2e_avx2")), load("control")

    def faster(run: Any, arm: str, what: str) -> str:
        of = run["ratios"][arm][what]
        return f"{of['pooled']:.2f}x ({of['low']:.2f} to {of['high']:.2f})"

    def best(run: Any) -> str:
        arms = [arm for arm in run["ratios"] if arm.startswith("vllm-")]
        return max(arms, key=lambda arm: float(run["ratios"][arm]["e2e_per_token"]["pooled"]))

    arms = {
        "TLT with a trained drafter": lambda _: "tlt",
        f"the fastest of vLLM's own with that drafter ({', '.join(map(best, both))})": best,
        "TLT from a random drafter, in its first steps": lambda _: "tlt-fresh",
    }
    steps = " and ".join(str(len(run["arms"]["stock"]["reward"])) for run in both)
    machines = ("cores with bfloat16 products", "with AVX2 alone")
    body: list[list[object]] = [[f"{steps} steps, with intervals of 95 %", *machines]]
    for words, arm in arms.items():
        for what, key in ((f"{words}: rollout against stock verl, per token", "rollout_per_token"),
                          ("whole step, likewise", "e2e_per_token")):  # fmt: skip
            body.append([what, *(faster(run, arm(run), key) for run in both)])
    summary = load("drafter_study")["summary"]
    online = [summary[name]["online_vs_frozen_accept_length_late"] for name in ("random", "generic", "in_domain")]
    gains = ", ".join(f"{percent(of['mean'], int(abs(of['mean']) < 0.1))} %" for of in online)
    along = "drafter trained along against left as it is, accept length that vLLM served late in a run"
    body.append([along, gains, "from a random, a foreign and an in-domain drafter"])
    formula = [
        score["pct_of_oracle"] for replay in control["replay"]
        for score in (
            replay["policies"]["goodput"], *control["replay_detail"][replay["name"]]["goodput_other_seeds"]
        )
    ]  # fmt: skip
    odd = [replay["pct_of_oracle"]["goodput"] for replay in control["foreign"]]
    for words, found in (
        ("draft length chosen, against an oracle, simulated", formula),
        ("the same on step costs that are not the policy's formula", odd),
    ):
        body.append([words, f"{min(found):.1f} % at worst, {median(found):.1f} % in the median", f"{len(found)} runs"])
    wait, own = control["overhead_us_p50"], control["vllm_us_p50"]
    share = f"{100 * wait / own:.1f} % of what vLLM's own scheduler takes"
    body.append(["what an engine step of 256 requests waits for the choice", f"{wait:.0f} µs", share])
    return rows(("", "", ""), body)
