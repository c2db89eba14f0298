"""The drain: one long-tailed batch of 64 requests decoded to the last, on a real vLLM CPU engine, arm against arm.

All arms run interleaved in one process on one engine, every repetition in another order, every arm on the same prompts
and lengths. Policies keep what they learned from one repetition to the next, as they do from rollout to rollout;
`table` and `goodput` are told the calibration and the drafter's held-out acceptance, as in a run.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.control.engine import ARMS, BATCH, VLLM_ZERO, EngineProcess
from benchmarks.control.pairs import over
from benchmarks.control.policies import RIVALS
from benchmarks.control.toy import Toy
from benchmarks.simulate.recorded import recording, step_records, worth
from demo.machine import find_dtype
from verl_tlt.speculation.costs.tables import LatencyTable, interpolate

POLICY_ARMS = ("table", *RIVALS, "goodput")
FIXED = tuple(f"fixed-{k}" for k in ARMS if k > 0)
STEADY_TOKENS = 48
RECORDED = Path(__file__).parent / "recorded_cpu.json"
"""Step times of the drain, for the replay on a recorded engine."""


def drain(
    toy: Toy, repetitions: int, seconds: float, clock: str = "wall", say: Any = print, record: bool = False
) -> dict[str, Any]:
    """Race all arms on one engine.

    Args:
        toy: policy and drafter.
        repetitions: of every arm.
        seconds: no repetition of the race starts after so long.
        clock: "wall", or "cpu" for a machine shared with others: CPU seconds of the engine, for policies and result.
        say: called with lines on the way.
        record: write this machine's step times to `RECORDED`, which changes what the replay replays.

    Returns:
        `drain` (runs, tok_per_s by arm, accept_length) and `drain_detail`; `goodput_rollout` for the plot.
    """
    started = time.monotonic()
    arms = ("off", *FIXED, *POLICY_ARMS)
    with tempfile.TemporaryDirectory() as scratch:
        ours = EngineProcess("tlt", toy, Path(scratch), clock)
        try:
            table = ours.call("calibrate")
            say(f"engine up and calibrated after {time.monotonic() - started:.0f} s")
            for name in arms:
                ours.call("add_arm", name=name, table=table, trace=True)
            speeds = _race(ours, arms, repetitions, started + seconds, say)
            stats = {name: ours.call("stats", name=name) for name in arms}
            traced = (*arms, "fixed-0") if record else arms
            if record:
                ours.call("add_arm", name="fixed-0", table=table, trace=True)
                ours.call("use", name="fixed-0")
                ours.call("drain", seed=repetitions)
                ours.call("stats", name="fixed-0")
            traces = {name: (Path(scratch) / f"{name}.jsonl").read_text() for name in traced}
        finally:
            ours.close()
    if record:
        _keep_recording(traces)
    longest = stats[FIXED[-1]]
    accepted, offered = longest["num_accepted_tokens_per_pos"], longest["num_draft_tokens_per_pos"]
    shares = [a / o for a, o in zip(accepted, offered, strict=True) if o]
    accept_length = 1.0 + sum(accepted) / max(longest["num_drafts"], 1)
    tok_per_s = {
        name: {"median": round(statistics.median(v), 1), "min": round(min(v), 1), "max": round(max(v), 1)}
        for name, v in speeds.items()
    }
    return {
        "drain": {"runs": len(speeds["off"]), "tok_per_s": tok_per_s, "accept_length": round(accept_length, 3)},
        "drain_detail": {
            "clock": clock,
            "dtype": find_dtype(),
            "over_off": {name: faster(v, speeds["off"]) for name, v in speeds.items()},
            "goodput_over": {name: faster(speeds["goodput"], v) for name, v in speeds.items()},
            "tok_per_s_by_run": {name: [round(x, 1) for x in v] for name, v in speeds.items()},
            "accept_length_is": f"tokens per draft of {ARMS[-1]}, temperature 1",
            "expected_acceptance": toy.acceptance,
            "accepted_share_by_position": [round(share, 4) for share in shares],
            "worth_pct": {name: round(_worth(traces[name], table, shares), 2) for name in (*FIXED, *POLICY_ARMS)},
            "k_steps": {name: stats[name]["steps_by_draft_length"] for name in POLICY_ARMS},
            "calibration": table,
        },
        "goodput_rollout": rollout(traces["goodput"]),
    }


def cost_of_control(toy: Toy, clock: str, say: Any, batches: Sequence[int], turns: int) -> dict[str, Any]:
    """Steps of ours without drafts against vLLM without a drafter, and against vLLM with its own static K=0.

    Every turn takes each of the four once, in another order; all turns are pooled.

    Returns:
        `off_overhead`: K=0 under our control over vLLM's K=0, less 1, median over batches; `cost_vs_stock_by_batch`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        engines = {kind: EngineProcess(kind, toy, Path(scratch), clock) for kind in ("tlt", "stock")}
        try:
            for name in ("off", "fixed-0"):
                engines["tlt"].call("add_arm", name=name, table=[], trace=True)
            return _compare(engines, say, batches, turns)
        finally:
            for engine in engines.values():
                engine.close()


def _race(
    ours: EngineProcess, arms: tuple[str, ...], repetitions: int, deadline: float, say: Any
) -> dict[str, list[float]]:
    """Tokens per second of every arm and repetition."""
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for turn in range(repetitions):
        begin = time.monotonic()
        random.Random(turn).shuffle(order)
        for name in order:
            ours.call("use", name=name)
            result = ours.call("drain", seed=turn)
            speeds[name].append(result["tokens"] / result["seconds"])
        took = time.monotonic() - begin
        say(f"repetition {turn + 1} took {took:.0f} s: " + ", ".join(f"{n} {speeds[n][-1]:.0f}" for n in arms))
        if time.monotonic() + took > deadline:
            break
    return speeds


def faster(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times as fast in tokens a second, all repetitions pooled, with the interval of 95 %.

    Both had the same tokens in a repetition, so that a machine's slow minutes are in both: their seconds are compared.
    """
    return over([1.0 / speed for speed in theirs], [1.0 / speed for speed in ours])


def _worth(trace: str, calibration: list[dict[str, Any]], accepted: list[float]) -> float:
    """What an arm's draft lengths are worth if every step costs what the calibration of this engine says."""
    table = LatencyTable.from_list(calibration)
    by_length = {k: table.by_batch(k) for k in table.arms()}
    return worth(step_records(trace.splitlines()), lambda batch, k: interpolate(by_length[k], batch), accepted)


def _compare(engines: dict[str, EngineProcess], say: Any, batches: Sequence[int], turns: int) -> dict[str, Any]:
    """Steps of ours without drafts against vLLM's own, batch by batch, interleaved."""
    found: dict[str, dict[str, Any]] = {}
    zero_against_zero = []
    for batch in batches:
        seconds: dict[str, list[float]] = {"stock": [], VLLM_ZERO: [], "off": [], "fixed-0": []}
        for turn in range(turns):
            for name in random.Random(turn).sample(sorted(seconds), len(seconds)):
                engine = engines.get(name, engines["tlt"])
                if name != "stock":
                    engine.call("use", name=name)
                seconds[name].append(engine.call("steady", batch=batch, tokens=STEADY_TOKENS, seed=turn)["seconds"])
        off, zero, own = (
            over(seconds[ours], seconds[theirs])
            for ours, theirs in (("off", "stock"), ("fixed-0", "stock"), ("fixed-0", VLLM_ZERO))
        )
        found[str(batch)] = {
            "off_over_stock": off[0], "off_interval": off[1:], "k0_over_stock": zero[0], "k0_interval": zero[1:],
            "k0_over_vllm_k0": own[0], "k0_over_vllm_interval": own[1:],
            "stock_ms_per_step": round(1e3 * statistics.median(seconds["stock"]) / STEADY_TOKENS, 2),
            "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        }  # fmt: skip
        zero_against_zero.append(own[0] - 1.0)
        say(f"batch {batch}, {turns} turns: { {k: v for k, v in found[str(batch)].items() if k != 'seconds'} }")
    return {"off_overhead": round(statistics.median(zero_against_zero), 4), "cost_vs_stock_by_batch": found}


def _keep_recording(traces: dict[str, str]) -> None:
    """Condense all fixed arms' traces into a latency table for the replay."""
    steady = (*FIXED, "off", "fixed-0", "bandit")
    lines = [line for name in steady for line in traces[name].splitlines()]
    found = recording(step_records(lines))
    content = {
        "points": found.table.to_list(),
        "jitter": round(found.jitter, 4),
        "acceptance": [round(a, 4) for a in found.acceptance],
    }
    RECORDED.write_text(json.dumps(content, indent=1) + "\n")


def rollout(trace: str) -> list[list[float]]:
    """The last whole drain in an engine trace: [seconds since its start, batch, K] per step."""
    steps = [json.loads(line) for line in trace.splitlines()]
    before = [0, *(s["batch"] for s in steps)]
    starts = [i for i, s in enumerate(steps) if s["batch"] >= 0.9 * BATCH and before[i] < BATCH // 2]
    last = steps[starts[-1] :] if starts else steps
    begin = last[0]["t"] - last[0]["latency_s"]
    return [[round(s["t"] - begin, 4), s["batch"], s["k"]] for s in last if s["batch"]]
