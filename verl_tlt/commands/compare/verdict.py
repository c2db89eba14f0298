"""What a comparison says, in sentences: faster, slower, or no difference seen. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from verl_tlt.commands.compare.interval import FEWEST
from verl_tlt.commands.compare.turns import Turn

MOST_ROUNDS = 100
"""More than this many further rounds is as good as never."""


def verdict(name: str, other: str, ratio: Mapping[str, Any], rounds: int) -> str:
    """Whether arm `name` was faster than `other`, a sentence, by a pooled ratio (`pooled.ratio`) of so many rounds."""
    pooled, low, high = ratio["pooled"], ratio["low"], ratio["high"]
    count, found = len(ratio["each"]), f"{pooled:.2f}x (95 %: {low:.2f} to {high:.2f})"
    if count < FEWEST:
        more = math.ceil((FEWEST - count) * max(1, rounds) / max(1, count))
        return (
            f"Too few steps to tell: {count} of each arm count, {FEWEST} are needed; {_rounds(more)} more would do "
            f"(so far {name} against {other}: {pooled:.2f}x)."
        )
    if low > 1:
        return f"{name} was faster than {other}: {found} in a step per token."
    if high < 1:
        return f"{name} was slower than {other}: {found} in a step per token."
    seen = f"No difference seen between {name} and {other}: {found} in a step per token"
    further = rounds_to_tell(ratio, rounds)
    if further > MOST_ROUNDS:
        return f"{seen}; if there is one, it is smaller than these bounds, and more rounds would hardly tell."
    return f"{seen}; if the ratio is what it seems, about {_rounds(further)} more would tell."


def paid_back(name: str, other: str, lead: Mapping[str, Any]) -> str:
    """When an arm that had fallen behind `other` made up for it, by `pooled.lead`; empty: it never had."""
    step, low = min(lead["seconds"], key=lambda row: row[1])
    last, end = lead["seconds"][-1]
    if low >= 0:
        return ""
    made_up = f"ahead from step {lead['from_step']} on" if lead["from_step"] else "not ahead yet"
    return (
        f"{name} was {-low:.0f} s behind {other} after step {step} and is {made_up}: {end:+.0f} s after step {last}, "
        "per token, its own work and waiting included."
    )


def rounds_to_tell(ratio: Mapping[str, Any], rounds: int) -> float:
    """How many further rounds put the interval on one side of 1, if the pooled ratio is the true one.

    An interval narrows with the root of the number of steps.
    """
    pooled = math.log(ratio["pooled"])
    half = math.log(ratio["pooled"] / ratio["low"]) if pooled > 0 else math.log(ratio["high"] / ratio["pooled"])
    return math.inf if pooled == 0 else max(1, math.ceil(rounds * ((half / pooled) ** 2 - 1)))


def _rounds(count: float) -> str:
    return f"{count:.0f} round{'s' if count != 1 else ''}"


def left_out(turns: Mapping[str, Sequence[Turn]], stock: str) -> list[str]:
    """What the ratios do not contain, a sentence for each arm: a long run pays it once, a turn every time."""
    found, stocks = [], _once(turns[stock])
    for name, taken in turns.items():
        start, first, saved = _once(taken)
        added = start + first - stocks[0] - stocks[1]
        beside = "" if name == stock else f", {abs(added):.0f} s {'more' if added > 0 else 'less'} than {stock}'s"
        found.append(
            f"{name}: {start:.0f} s a turn to start and end the job and {first:.0f} s for its first step{beside}; "
            f"{saved:.0f} s for the checkpoint."
        )
    return found


def _once(turns: Sequence[Turn]) -> tuple[float, float, float]:
    return mean(t.start_s for t in turns), mean(t.first_s for t in turns), mean(t.checkpoint_s for t in turns)


def reward(values: Sequence[float]) -> str:
    """Mean and standard deviation of the steps' rewards."""
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{mean(values):.3f}"


def other_prompts(stock: Sequence[Any], arm: Sequence[Any]) -> int:
    """In how many steps an arm had other prompts than stock had."""
    known = {(step.turn, step.step): step.prompt for step in stock}
    return sum(known.get((step.turn, step.step), step.prompt) != step.prompt for step in arm)
