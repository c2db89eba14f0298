"""Tables about whole runs against stock verl."""

from __future__ import annotations

from statistics import mean
from typing import Any

from tables.page import faster, load, recorded, rows


def end_to_end() -> str:
    """All arms against stock."""
    return _end_to_end("e2e")


def end_to_end_large() -> str:
    """The same with four times as many responses a step."""
    return _further("e2e_large")


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


def arms() -> str:
    """Every arm of the benchmark in words."""
    return rows(("Arm", "Is"), [[f"`{name}`", arm["label"]] for name, arm in load("e2e")["arms"].items()])


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


def cold_start_rule() -> str:
    """The same as a user's run is, whose own rule gives so short a one no cold start."""
    return _cold_start("cold_start_rule")


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


def claim(saved: dict[str, float]) -> list[str]:
    """Cells: the savings by the account, those measured, and the difference."""

    def with_range(value: float, of: str) -> str:
        return f"{value:.1f} s ({saved[f'{of}_low_s']:.1f} to {saved[f'{of}_high_s']:.1f})"

    claimed, measured = saved["claimed_s"], saved["measured_s"]
    return [f"{claimed:.1f} s", with_range(measured, "measured"), with_range(claimed - measured, "error")]


def savings() -> str:
    """Savings by the account and measured."""
    return _savings("e2e_forced")


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
        lengths = " / ".join(f"{arm[key]:.2f}" for key in ("accept_length", "accept_length_tail") if arm.get(key))
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
