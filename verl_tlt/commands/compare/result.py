"""What all turns of a comparison say together: arms, ratios against stock, sentences. Numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_tlt.commands.compare.arms import STOCK, TLT, Arm
from verl_tlt.commands.compare.pooled import pairs, ratio, ratios, summary
from verl_tlt.commands.compare.turns import Record
from verl_tlt.commands.compare.verdict import left_out, other_prompts, paid_back, verdict

RATIOS = {"rollout_per_token": "rollout", "e2e_per_token": "step"}
"""Ratios that are shown, by their name in the result."""


def found_of(arms: Sequence[Arm], record: Record) -> dict[str, Any]:
    """Everything that is concluded from the turns of arms that have any, as JSON has it."""
    taken = {arm.name: record.of(arm.name) for arm in arms if record.steps(arm.name)}
    stock = record.steps(STOCK)
    compared = [name for name in taken if name != STOCK and pairs(stock, record.steps(name))]
    rounds = {name: len(record.of(name)) for name in taken}
    against = {name: ratios(stock, record.steps(name)) for name in compared}
    sentences = [verdict(name, STOCK, against[name]["e2e_per_token"], rounds[name]) for name in compared]
    sentences += _against_best(record, compared, against)
    sentences += filter(None, (paid_back(name, STOCK, against[name]["lead"]) for name in compared))
    if compared:
        sentences += ["Left out of the ratios:", *left_out({name: taken[name] for name in (STOCK, *compared)}, STOCK)]
    for name in compared:
        if others := other_prompts(stock, record.steps(name)):
            sentences.append(f"In {others} of its steps {name} had other prompts than {STOCK}.")
    return {
        "arms": {arm.name: _arm(arm, record) for arm in arms if arm.name in taken},
        "ratios": against,
        "sentences": sentences,
        "turns": record.rows(),
    }


def _arm(arm: Arm, record: Record) -> dict[str, Any]:
    found = summary(record.steps(arm.name))
    logged = [turn.accept_length for turn in record.of(arm.name) if turn.accept_length]
    if found["accept_length"] is None and logged:
        found["accept_length"] = round(sum(logged) / len(logged), 4)
    return {"label": arm.label, "overrides": list(arm.overrides), "environment": dict(arm.environment), **found}


def _against_best(record: Record, compared: Sequence[str], against: Mapping[str, Any]) -> list[str]:
    """TLT against the fastest of the other arms, where there are any."""
    others = [name for name in compared if not name.startswith(TLT)]
    if TLT not in compared or not others:
        return []
    best = max(others, key=lambda name: float(against[name]["e2e_per_token"]["pooled"]))
    both = pairs(record.steps(best), record.steps(TLT))
    if not both:
        return []
    found = ratio(both, lambda step: step.step_s, lambda step: step.tokens)
    return [verdict(TLT, f"{best}, the fastest of the others", found, len(record.of(TLT)))]


def spell(of: Mapping[str, Any]) -> str:
    """A ratio with its interval."""
    return f"{of['pooled']:.2f}x ({of['low']:.2f} to {of['high']:.2f})"
