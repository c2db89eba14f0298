"""`goodput` against vLLM's own speculation with a fixed K, on a real vLLM CPU engine, with a warmed-up drafter.

The drafter is the end-to-end benchmark's, and a drain begins with as many requests as an engine has there in its two
loads. Both sides run in one engine, a fixed K under vLLM's own scheduler, and take turns drain by drain, in another
order each time: whole runs minutes apart differ by what the machine does meanwhile. Each load starts from the
calibration anew, and what `goodput` learns it keeps for the load.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.control.engine import VLLM, EngineProcess
from benchmarks.control.toy import Toy
from benchmarks.e2e.heads import WARM, prepare
from benchmarks.e2e.loads import LOADS
from demo.machine import find_dtype
from demo.toy.assets import build_assets, demo_width
from verl_tlt.commands.compare.result import ratio

FIXED = tuple(f"{VLLM}{k}" for k in (3, 4, 5, 6, 7))
POLICIES = ("table", "goodput")
ENGINES = 2
"""That share a load's responses."""


def bench_toy(folder: Path) -> Toy:
    """The end-to-end benchmark's policy and warmed-up drafter, made below `folder` unless they are there."""
    assets = build_assets(folder, width=demo_width(find_dtype()), train_rows=1, val_rows=1)
    head = prepare(folder, WARM)
    return Toy(assets.policy, head.drafter, head.acceptance)


def against_fixed(toy: Toy, repetitions: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Race both policies and every fixed K in all loads.

    Args:
        toy: the policy with a warmed-up drafter.
        repetitions: drains of every arm and load.
        seconds: no repetition of a load starts after so long in it.
        say: called with a line for each repetition.

    Returns:
        `loads`, by name: `requests`; `seconds` by arm and repetition; `goodput_over`, [ratio, low, high] (95 %) by arm.
    """
    loads: dict[str, Any] = {}
    engine = EngineProcess(toy)
    try:
        table = engine.call("calibrate")
        for name, load in LOADS.items():
            for policy in POLICIES:
                engine.call("add_arm", name=policy, table=table)
            requests = load.responses // ENGINES
            spent = _race(engine, requests, repetitions, time.monotonic() + seconds, say)
            ratios = {arm: _over(spent[arm], spent["goodput"]) for arm in (*FIXED, "table")}
            loads[name] = {"requests": requests, "seconds": spent, "goodput_over": ratios}
            say(f"{requests} requests: {ratios}")
    finally:
        engine.close()
    return {"dtype": find_dtype(), "acceptance": toy.acceptance, "loads": loads}


def _over(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """All their seconds over all of ours, drain by drain, as `verl-tlt compare` pools them: [ratio, low, high]."""
    found = ratio(list(zip(theirs, ours, strict=True)), float, lambda _: 1.0)
    return [found["pooled"], found["low"], found["high"]]


def _race(
    engine: EngineProcess, requests: int, repetitions: int, until: float, say: Callable[[str], None]
) -> dict[str, list[float]]:
    spent: dict[str, list[float]] = {arm: [] for arm in (*FIXED, *POLICIES)}
    order = list(spent)
    for turn in range(repetitions):
        if time.monotonic() > until:
            break
        random.Random(turn).shuffle(order)
        for arm in order:
            engine.call("use", name=arm)
            spent[arm].append(engine.call("drain", seed=turn, batch=requests)["seconds"])
        say(f"{requests} requests, {turn + 1}: " + ", ".join(f"{arm} {of[-1]:.1f}" for arm, of in spent.items()))
    return spent
