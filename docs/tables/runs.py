"""Tables about whole runs against stock verl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

from tables.page import load, per_token, rows, source, two_places


def arms() -> str:
    """Every arm of the benchmark in words."""
    return rows(("Arm", "Is"), [[f"`{name}`", arm["label"]] for name, arm in load("e2e_real")["arms"].items()])


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
    beside = next(said for said in found["sentences"] if "the fastest of the others" in said)
    return f"{source(file)}{rows(head, body)}\n{beside}\n"


def _steps(found: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    return [step for turn in found["turns"] if turn["arm"] == arm for step in turn["steps"]]


def _outside(steps: Iterable[Mapping[str, float]]) -> str:
    """Seconds outside rollout for 1,000 tokens."""
    steps = list(steps)
    spent = sum(step["step_s"] - step["rollout_s"] for step in steps)
    return f"{1000 * spent / sum(step['tokens'] for step in steps):.1f} s"
