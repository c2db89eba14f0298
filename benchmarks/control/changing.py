"""A run in which drafter, policy and load change, on a real vLLM CPU engine: is adapting faster than a fixed choice?

One repetition is a run of five rollouts: with an untrained drafter, one trained a little, a trained one; then with the
policy moved away from it; at last with a few long responses. Every arm decodes each rollout once, on the same prompts
and lengths and in another order each time, before the next begins; an arm keeps nothing from one repetition to the
next. All repetitions are pooled: an arm's seconds over all of them, over goodput's.

`goodput` gets what a run would tell it: the calibration at the start, a new drafter's acceptance on held-out text when
it is published, nothing of the policy's move; and as in a run, its drafter is OFF where it is not expected to pay
(`RolloutDecision`). The table was told the calibration and the trained drafter's acceptance, as somebody would who sets
it up beforehand. A fixed K knows nothing.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.control.engine import ARMS, EngineProcess
from benchmarks.control.pairs import over
from benchmarks.control.toy import Toy
from demo.machine import find_dtype

FIXED = tuple(f"fixed-{k}" for k in ARMS if k > 0)
NAMES = (*FIXED, "table", "goodput")
BATCH, SHARE = 16, 0.15
"""Requests of a rollout, and how long its responses are beside the demo's: a repetition takes minutes so."""
FEW, LONG = 3, 120
"""Responses of the last rollout, and their tokens."""
MOVED = 0.2
"""Noise of the policy's move, in standard deviations of each weight matrix."""


@dataclass(frozen=True)
class Stage:
    """A rollout of the run."""

    name: str
    drafter: str
    """Which of `prepare`'s is published before it."""
    moved: float = 0.0
    few: bool = False


STAGES = (
    Stage("asleep", "untrained"),
    Stage("awake", "awake"),
    Stage("trained", "trained"),
    Stage("policy moved", "trained", MOVED),
    Stage("few and long", "trained", MOVED, few=True),
)

Turn = dict[str, dict[str, float]]
"""Seconds of one repetition: {arm: {stage: seconds}}."""
Found = dict[str, Any]


def changing(
    toys: dict[str, Toy],
    repetitions: int,
    seconds: float,
    say: Callable[[str], None],
    keep: Callable[[Found], None],
    before: Found | None = None,
) -> None:
    """Run the five rollouts again and again under every arm.

    Args:
        toys: the policy with its drafters: `untrained`, `awake`, `trained`.
        repetitions: of the whole run, those `before` included.
        seconds: no repetition starts after so long.
        say: called with lines on the way.
        keep: called with what was found so far, after every repetition: pooled ratios with their intervals, and all
            repetitions.
        before: what an earlier call kept, which this one goes on with.
    """
    with tempfile.TemporaryDirectory() as scratch:
        engine = EngineProcess("tlt", toys["trained"], Path(scratch))
        try:
            table, started = engine.call("calibrate"), time.monotonic()
            turns: list[Turn] = list(before["repetitions"]) if before else []
            seen: list[dict[str, dict[str, float]]] = list(before["seen"]) if before else []
            while len(turns) < repetitions and time.monotonic() < started + seconds:
                begin = time.monotonic()
                spent, about = _repetition(engine, toys, table, len(turns))
                turns.append(spent)
                seen.append(about)
                totals = ", ".join(f"{name} {sum(of.values()):.1f}" for name, of in spent.items())
                say(f"repetition {len(turns)} took {time.monotonic() - begin:.0f} s: {totals}")
                keep(_pooled(turns) | {"seen": seen, "told": {name: toy.acceptance for name, toy in toys.items()}})
        finally:
            engine.close()


def _pooled(turns: Sequence[Turn]) -> Found:
    found = {name: {stage: faster(turns, name, stages) for stage, stages in _parts().items()} for name in NAMES[:-1]}
    return {"dtype": find_dtype(), "repetitions": list(turns), "goodput_is_faster_than": found}


def faster(turns: Sequence[Turn], name: str, stages: Sequence[str]) -> list[float]:
    """An arm's seconds over goodput's in these stages, all repetitions pooled: [ratio, low, high] (95 %)."""
    return over(*([sum(turn[arm][stage] for stage in stages) for turn in turns] for arm in (name, "goodput")))


def _parts() -> dict[str, list[str]]:
    """The whole run, and each of its rollouts."""
    return {"all": [s.name for s in STAGES], **{s.name: [s.name] for s in STAGES}}


def _repetition(
    engine: EngineProcess, toys: dict[str, Toy], table: list[dict[str, Any]], turn: int
) -> tuple[Turn, dict[str, dict[str, float]]]:
    """Seconds by arm and stage; by stage the accept length at K=3, and whether goodput's drafter ran."""
    for name in NAMES:
        engine.call("add_arm", name=name, table=table)
    seconds: Turn = {name: {} for name in NAMES}
    seen: dict[str, dict[str, float]] = {stage.name: {} for stage in STAGES}
    order, rng = list(NAMES), random.Random(turn)
    for number, stage in enumerate(STAGES):
        engine.call("publish", drafter=str(toys[stage.drafter].drafter / "model.safetensors"))
        engine.call("move_policy", noise=stage.moved)
        rng.shuffle(order)
        for name in order:
            engine.call("use", name=name)
            if name == "goodput":
                drafted = engine.call("sync", name=name, acceptance=toys[stage.drafter].acceptance)
                seen[stage.name]["goodput_drafted"] = float(drafted)
            work: dict[str, Any] = {"seed": turn * len(STAGES) + number}
            if stage.few:
                seconds[name][stage.name] = engine.call("steady", batch=FEW, tokens=LONG, **work)["seconds"]
            else:
                seconds[name][stage.name] = engine.call("drain", batch=BATCH, share=SHARE, **work)["seconds"]
            if name == "fixed-3":
                stats = engine.call("stats", name=name)
                accepted = sum(stats["num_accepted_tokens_per_pos"]) / max(stats["num_drafts"], 1)
                seen[stage.name]["accept_length_at_k3"] = round(1.0 + accepted, 3)
    return seconds, seen
