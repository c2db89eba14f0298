"""What the steps of all arms say together: medians, and ratios against stock with an interval. Numbers only.

A step of an arm is compared with stock's step of the same turn and number, which had the same prompts. Ratios are of
sums: all of stock's seconds over all of the arm's. Lengths are sampled, so an arm may have had more to write; the ratio
per token divides each side by the tokens that it wrote. Its interval comes from drawing the pairs anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl_tlt.commands.compare.interval import interval
from verl_tlt.commands.report.rows import step_row
from verl_tlt.errors import TLTError


class MetricsError(TLTError):
    """A step's metrics lack what is compared."""


@dataclass(frozen=True)
class Step:
    """One RL step of one arm."""

    turn: int
    step: int
    step_s: float
    rollout_s: float
    tokens: float
    """Of all responses."""
    longest: float
    """Tokens of the longest response."""
    reward: float
    accept_length: float | None = None
    accept_length_tail: float | None = None
    """Of the longest tenth of the responses."""
    saved_s: float | None = None
    overhead_s: float | None = None
    cold_start_s: float | None = None
    """The part of `overhead_s` in which the drafter of a run without one was trained."""
    off_frac: float | None = None
    """Share of engine steps that drafted nothing; None: the run has no TLT."""
    prompt: float | None = None
    """Mean tokens of its prompts: other ones, other prompts."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of verl's phases outside rollout, by its name for them."""


PHASES = ("reward", "old_log_prob", "adv", "update_actor", "update_weights")
Pairs = Sequence[tuple[Step, Step]]
T = TypeVar("T")


def read_step(turn: int, step: int, metrics: Mapping[str, float]) -> Step:
    """From verl's metrics of a step; what the checkpoint took is no part of its time."""
    row = step_row(metrics)
    needed = {name: row[name] for name in ("step_s", "rollout_s", "tokens", "reward")}
    if missing := [name for name, value in needed.items() if value is None]:
        raise MetricsError(f"verl logged no {' and no '.join(missing)} for step {step}, which is what is compared.")
    known = {name: float(value or 0.0) for name, value in needed.items()}
    known["step_s"] -= metrics.get("timing_s/save_checkpoint", 0.0)
    return Step(
        turn=turn,
        step=step,
        **known,
        longest=metrics.get("response_length/max", 0.0),
        accept_length=metrics.get("tlt/accept_length"),
        accept_length_tail=metrics.get("tlt/accept_length_tail"),
        saved_s=metrics.get("tlt/saved_s"),
        overhead_s=metrics.get("tlt/overhead_s"),
        cold_start_s=metrics.get("tlt/overhead_cold_start_s"),
        off_frac=metrics.get("tlt/spec_off_frac"),
        prompt=metrics.get("prompt_length/mean"),
        phases={name: metrics[key] for name in PHASES if (key := f"timing_s/{name}") in metrics},
    )


def pairs(stock: Sequence[Step], arm: Sequence[Step]) -> list[tuple[Step, Step]]:
    """(stock's step, the arm's) for every turn and number that both have."""
    of_stock = {(step.turn, step.step): step for step in stock}
    return [(of_stock[step.turn, step.step], step) for step in arm if (step.turn, step.step) in of_stock]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(
    both: Sequence[tuple[T, T]], seconds: Callable[[T], float], per: Callable[[T], float], seed: int = 0
) -> dict[str, Any]:
    """How many times as fast the arm is: stock's seconds over the arm's, each for what `per` counts.

    Returns:
        `pooled`, `low` and `high` (95 %), and the ratio of every pair, `each`.
    """

    def of(chosen: Sequence[tuple[T, T]]) -> float:
        pace = [sum(map(seconds, side)) / sum(map(per, side)) for side in zip(*chosen, strict=True)]
        return pace[0] / pace[1]

    pooled, low, high = interval(both, of, seed)
    return {
        "pooled": round(pooled, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "each": [round(of([pair]), 4) for pair in both],
    }


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """One arm's figures."""
    accepted = [step.accept_length for step in steps if step.accept_length is not None]
    tail = [step.accept_length_tail for step in steps if step.accept_length_tail is not None]
    return {
        "step_s": spread([step.step_s for step in steps]),
        "rollout_s": spread([step.rollout_s for step in steps]),
        "train_s": spread([step.step_s - step.rollout_s for step in steps]),
        "tok_per_s": spread([step.tokens / step.rollout_s for step in steps]),
        "phases_s": {name: round(statistics.mean(step.phases.get(name, 0.0) for step in steps), 4) for name in PHASES},
        "accept_length": round(statistics.median(accepted), 4) if accepted else None,
        "accept_length_tail": round(statistics.median(tail), 4) if tail else None,
        "reward": [round(step.reward, 4) for step in steps],
    }


def saved(both: Pairs) -> dict[str, float] | None:
    """What an arm's `tlt/saved_s` claimed over the steps that had one, and by how much their rollouts were shorter.

    Returns:
        `claimed_s` and `measured_s`, and between what 95 % of the draws find the latter (`measured_low_s`,
        `measured_high_s`) and the claim's error (`error_low_s`, `error_high_s`): stock's step is of another time than
        ours, so the machine's pace is in what was measured too. None: no step had a claim.
    """
    told = [(ours.saved_s, theirs.rollout_s - ours.rollout_s) for theirs, ours in both if ours.saved_s is not None]
    if not told:
        return None
    measured, low, high = interval(told, lambda rows: sum(true for _, true in rows))
    _, error_low, error_high = interval(told, lambda rows: sum(claim - true for claim, true in rows))
    found = {
        "claimed_s": sum(claim for claim, _ in told),
        "measured_s": measured,
        "measured_low_s": low,
        "measured_high_s": high,
        "error_low_s": error_low,
        "error_high_s": error_high,
    }
    return {key: round(value, 2) for key, value in found.items()}


def lead(both: Pairs) -> dict[str, Any]:
    """How far an arm is ahead of stock, had stock written as many tokens in each step.

    Returns:
        `seconds`: (step, seconds ahead after it and all before it that count), negative while behind; `from_step`: the
        first from which it stays ahead, None: it is behind at the end.
    """
    ahead, total, since = [], 0.0, None
    for theirs, ours in sorted(both, key=lambda pair: pair[1].step):
        total += theirs.step_s * ours.tokens / theirs.tokens - ours.step_s
        ahead.append((ours.step, round(total, 2)))
        since = None if total <= 0.0 else since or ours.step
    return {"seconds": ahead, "from_step": since}


def ratios(stock: Sequence[Step], arm: Sequence[Step]) -> dict[str, Any]:
    """Rollout and whole step against stock, by step and by token, what it is ahead, and the account of `tlt/saved_s`.

    `rollout_off` is of the rollouts in which nothing was drafted, per token; None: there was none.
    """
    both = pairs(stock, arm)
    off = [(theirs, ours) for theirs, ours in both if ours.off_frac == 1.0]
    return {
        "saved": saved(both),
        "lead": lead(both),
        "rollout_off": ratio(off, lambda s: s.rollout_s, lambda s: s.tokens) if off else None,
        "rollout": ratio(both, lambda s: s.rollout_s, lambda s: 1.0),
        "rollout_per_token": ratio(both, lambda s: s.rollout_s, lambda s: s.tokens),
        "e2e": ratio(both, lambda s: s.step_s, lambda s: 1.0),
        "e2e_per_token": ratio(both, lambda s: s.step_s, lambda s: s.tokens),
    }
