"""Ratios of whole runs that are adjusted for the lengths that each arm sampled.

Whether a step has a straggler changes its rollout by a factor of five, and each arm samples its own responses. So an
arm's measured rollout is divided by what is predicted for its own lengths (step costs as measured, held-out acceptance)
and multiplied by what is predicted for the lengths of all arms. The rest of a step goes with the number of tokens. verl
writes the responses of each step (`trainer.rollout_data_dir`); their lengths are counted here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.control.drains import NONE, OURS, VLLM, predict
from benchmarks.intervals import pooled
from verl_tlt.bootstrap import Floats
from verl_tlt.commands.compare.plan import STOCK, TLT
from verl_tlt.commands.compare.record import Step
from verl_tlt.speculation.costs import LatencyTable

REPLICAS, SPLITS = 2, 8
"""Replicas, and how often a step's responses are split among them at random. A rollout ends with the slower one."""
SPECULATES = {STOCK: NONE, "tlt-fresh": NONE, TLT: OURS, "vllm-3": f"{VLLM}3", "vllm-7": f"{VLLM}7"}
"""How each arm is predicted. What a drafter that starts untrained accepts is not known before: no drafts."""
Predict = Callable[[str, Sequence[int]], float]
"""Seconds of a rollout by arm and lengths."""


@dataclass(frozen=True)
class Sampled:
    """A step of an arm: what it took, and the lengths of its responses."""

    step: Step
    lengths: tuple[int, ...]

    @property
    def rest_s(self) -> float:
        return self.step.step_s - self.step.rollout_s


def lengths_in(file: Path, count: Callable[[str], int], longest: int) -> tuple[int, ...]:
    """Tokens of each response in a file of verl's: what `count` finds in its text, and the one that ended it."""
    rows = map(json.loads, file.read_text().splitlines())
    return tuple(min(longest, count(row["output"]) + 1) for row in rows)


def sampled(steps: Sequence[Step], folder: Path, count: Callable[[str], int], longest: int) -> list[Sampled]:
    """The steps whose responses are in `folder`."""
    files = {step: folder / f"{step.step}.jsonl" for step in steps}
    return [Sampled(step, lengths_in(file, count, longest)) for step, file in files.items() if file.exists()]


def rollouts(costs: LatencyTable, acceptance: Sequence[float], prompt: int) -> Predict:
    """A prediction from step costs and an acceptance, for replicas that begin with `prompt` tokens a request."""

    def seconds(arm: str, lengths: Sequence[int]) -> float:
        accepted = (0.0,) * len(acceptance) if arm.endswith("-lost") else acceptance
        drawn, found = random.Random(0), []
        for _ in range(SPLITS):
            order = drawn.sample(lengths, len(lengths))
            parts = [order[i::REPLICAS] for i in range(REPLICAS)]
            kind = SPECULATES[arm.removesuffix("-lost")]
            found.append(max(predict(costs, accepted, part, prompt, kind) for part in parts))
        return mean(found)

    return seconds


def adjusted(arms: Mapping[str, Sequence[Sampled]], predicted: Predict) -> dict[str, dict[str, list[float]]]:
    """By arm: how many times as fast as stock its rollouts and its steps are, [ratio, low, high] (95 %)."""
    every = [one.lengths for of in arms.values() for one in of]
    tokens = mean(map(sum, every))
    rows = {
        name: {
            (one.step.turn, one.step.step): (
                one.step.rollout_s,
                predicted(name, one.lengths),
                one.rest_s,
                float(sum(one.lengths)),
            )
            for one in of
        }
        for name, of in arms.items()
    }
    usual = {name: mean(predicted(name, lengths) for lengths in every) for name in arms}
    found: dict[str, dict[str, list[float]]] = {}
    for name in (name for name in arms if name != STOCK):
        both = [(*rows[STOCK][at], *rows[name][at]) for at in rows[STOCK] if at in rows[name]]

        def speedup(sums: Floats, *, whole: bool, name: str = name) -> Floats:
            def seconds(of: str, first: int) -> Floats:
                rollout, expected, rest, written = sums[:, first : first + 4].T
                other: Any = tokens * rest / written if whole else 0.0
                return usual[of] * rollout / expected + other

            ratio: Floats = seconds(STOCK, 0) / seconds(name, 4)
            return ratio

        if both:
            found[name] = {
                what: [round(value, 4) for value in pooled(both, partial(speedup, whole=whole))]
                for what, whole in (("rollout", False), ("step", True))
            }
    return found
