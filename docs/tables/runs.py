"""Tables about whole runs against stock verl."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

from tables.page import faster, load, per_token, rows, source, two_places


def arms() -> str:
    """Every arm of the benchmark in words."""
    return rows(("Arm", "Is"), [[f"`{name}`", arm["label"]] for name, arm in load("e2e")["arms"].items()])


def end_to_end(file: str) -> str:
    """Every arm against stock, and TLT against the fastest of the others."""
    found = load(file)
    body = []
    for name in found["ratios"]:
        arm = found["arms"][name]
        accepted = two_places(arm["accept_length"])
        speeds = [per_token(found, name, what) for what in ("rollout", "step")]
        body.append([f"`{name}`", *speeds, _outside(_steps(found, name)), accepted, f"{mean(arm['reward']):.2f}"])
    reward = mean(found["arms"]["stock"]["reward"])
    body.append(["`stock`", "", "", _outside(_steps(found, "stock")), "", f"{reward:.2f}"])
    head = ("", "rollout", "step", "outside rollout, per 1,000 tokens", "accept length", "reward")
    beside = _reworded(next(said for said in found["sentences"] if "the fastest of the others" in said))
    return f"{source(file)}{rows(head, body)}\n{beside}\n"


def _reworded(said: str) -> str:
    """A sentence of an older file, in the words of `commands.compare.result.verdict`."""
    older = r"No difference seen between (.+): (\S+x) \(95 %: (.+?)\) in a step per token;.*"
    measured = r"\2 per token in a step (95 % interval \3)"
    return re.sub(older, rf"No measurable difference between \1: {measured}. More rounds narrow the interval.", said)


def cold_start(file: str) -> str:
    """When a run without a drafter has made up for its cold start, beside one with a trained drafter."""
    found = load(file)
    body = []
    for name, of in found["ratios"].items():
        steps, seconds = _steps(found, name), of["lead"]["seconds"]
        low_at, low = min(seconds, key=lambda row: row[1])
        last, end = seconds[-1]
        lengths = [step["accept_length"] for step in steps if step["accept_length"] is not None]
        cold, at = max((step["cold_start_s"] or 0.0, step["step"]) for step in steps)
        body.append([
            f"`{name}`",
            f"{cold:.1f} s in step {at}" if cold else "",
            f"{lengths[0]:.2f} to {lengths[-1]:.2f}" if lengths else "",
            faster(of["e2e"]),
            f"{-low:.0f} s, step {low_at}" if low < 0 else "",
            f"step {of['lead']['from_step']}" if of["lead"]["from_step"] else "not yet",
            f"{end:+.0f} s, step {last}",
        ])  # fmt: skip
    head = ("", "cold start", "accept length", "step", "furthest behind stock", "ahead from", "ahead at the end")
    return source(file) + rows(head, body)


def savings(file: str) -> str:
    """Seconds saved by TLT's own estimate, beside those measured."""
    found = load(file)
    body = []
    for name, of in found["ratios"].items():
        if (saved := of["saved"]) is None:
            continue
        error = saved["claimed_s"] - saved["measured_s"]
        body.append([
            f"`{name}`",
            two_places(found["arms"][name]["accept_length"]),
            *(faster(of[key]) for key in ("rollout", "e2e")),
            f"{saved['claimed_s']:.1f} s",
            f"{saved['measured_s']:.1f} s ({saved['measured_low_s']:.1f} to {saved['measured_high_s']:.1f})",
            f"{error:.1f} s ({saved['error_low_s']:.1f} to {saved['error_high_s']:.1f})",
            _share_of_tlt(_steps(found, name)),
        ])  # fmt: skip
    head = ("", "accept length", "rollout", "step", "estimated (`tlt/saved_estimate_s`)", "measured",
            "estimate minus measured", "`tlt/overhead_s` of the step")  # fmt: skip
    return source(file) + rows(head, body)


def _steps(found: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    return [step for turn in found["turns"] if turn["arm"] == arm for step in turn["steps"]]


def _outside(steps: Iterable[Mapping[str, float]]) -> str:
    """Seconds outside rollout for 1,000 tokens."""
    steps = list(steps)
    spent = sum(step["step_s"] - step["rollout_s"] for step in steps)
    return f"{1000 * spent / sum(step['tokens'] for step in steps):.1f} s"


def _share_of_tlt(steps: Iterable[Mapping[str, float]]) -> str:
    steps = list(steps)
    return f"{100 * sum(step['overhead_s'] for step in steps) / sum(step['step_s'] for step in steps):.1f} %"
