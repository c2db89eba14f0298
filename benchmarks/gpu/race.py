"""A chosen K against every fixed K and no drafts, on an engine of a 7B policy's shape, in drains from many requests to
one.

The weights are random, so vLLM accepts drafts by chance, as often as it is told: its synthetic acceptance, of the V1
runner. Response lengths are drawn once for all arms of a round. First comes the calibration as in a run, and last a
sleep with a policy of real size. Step costs are in the report in the form that the replays read.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.control.drains import NONE, OURS, RULE, VLLM, verdict
from benchmarks.gpu.engines import hold, in_worker, shaped_engine, slept, stats
from benchmarks.gpu.parts import Bench
from benchmarks.intervals import ratio
from verl_tlt.commands.doctor.standalone_engine import StandaloneEngine
from verl_tlt.server import calibration
from verl_tlt.server.engine_arguments import most_requests, started_lengths
from verl_tlt.server.engine_calls import ask_scheduler
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.types import OFF

PROFILES = {
    "good": (0.80, 0.78, 0.76, 0.75, 0.74, 0.73, 0.72),
    "fair": (0.62, 0.58, 0.56, 0.55, 0.54, 0.53, 0.52),
}
"""P(draft token i is accepted | those before it were): accept lengths of 2.9 and 2.2 at K=3."""
ARMS = (
    "All arms run in one engine with K_max=7. With vLLM's V1 runner its FULL CUDA graphs are for K=7 alone, so off, "
    "vllm-k1 and vllm-k3 are not what stock vLLM does without drafts or with that K."
)
SLEEP_S = 20.0
"""Seconds that are left for the sleep."""
FIRST_S = 20.0
"""Seconds that the first round takes, at least."""
MOST_ROUNDS, LONGEST = 12, 600
Drained = dict[str, Any]


async def race(bench: Bench) -> dict[str, Any]:
    """Rounds until the part's time is over; what is known so far is noted after each."""
    found: dict[str, Any] = {"rule": RULE, "arms": ARMS}
    began = time.monotonic()
    async with shaped_engine(bench) as engine:
        found["policy"] = engine.setup.tlt.speculation.policy
        lengths = started_lengths(engine.llm)
        found |= {"engine_start_s": round(time.monotonic() - began, 1), "lengths": list(lengths)}
        table = await _costs(engine, found)
        bench.note(**found)
        await _rounds(bench, engine, table, [k for k in lengths if k], found)
        await in_worker(engine, synthetic, None)
        if bench.left() > SLEEP_S:
            await hold(engine, None)
            found["sleep_7b"] = await slept(bench, engine)
            bench.note(**found)
    return found


def synthetic(worker: Any, rates: Sequence[float] | None) -> bool:
    """Have vLLM accept drafts by chance at these rates from here on, or by the policy again; whether it can."""
    import torch

    sampler = worker.model_runner.rejection_sampler
    if rates is not None and worker.device.type == "cpu":
        return False  # its kernel has no such mode
    sampler.synthetic_mode = rates is not None
    told = None if rates is None else torch.tensor(rates, dtype=torch.float32, device=worker.device)
    sampler.synthetic_conditional_rates = told
    return True


async def _costs(engine: StandaloneEngine, found: dict[str, Any]) -> LatencyTable:
    """Step costs by a calibration as in a run, and its seconds."""
    start = time.monotonic()
    table = await engine.measure_costs(calibration.BUDGET_S)
    await stats(engine)  # raises where drafts cost nothing
    found["calibration_as_in_a_run_s"] = round(time.monotonic() - start, 1)
    found["costs_ms"] = {k: [(b, round(1e3 * s, 3)) for b, s in table.by_batch(k)] for k in table.lengths()}
    found["costs"] = table.to_list()
    return table


async def _rounds(
    bench: Bench, engine: StandaloneEngine, table: LatencyTable, fixed: Sequence[int], found: dict[str, Any]
) -> None:
    """As many rounds as there is time for, each of all arms at both acceptances, in another order each time."""
    rounds: list[dict[str, Any]] = []
    took = 0.0 if bench.tiny else FIRST_S
    arms = [*(f"{VLLM}{k}" for k in fixed), OURS]
    requests = most_requests(engine.llm)
    found |= {"requests": requests, "rounds": rounds}
    for rates in PROFILES.values():  # what is used first compiles
        await in_worker(engine, synthetic, list(rates))
        await _drain(engine, OURS, table, rates, [8] * requests)
    while len(rounds) < (1 if bench.tiny else MOST_ROUNDS) and bench.left() > SLEEP_S + 1.2 * took:
        start, rng = time.monotonic(), random.Random(len(rounds))
        lengths = [draw_length(bench, rng) for _ in range(requests)]
        each: dict[str, Any] = {"lengths": lengths, NONE: await _drain(engine, NONE, table, (), lengths)}
        for name in rng.sample(sorted(PROFILES), len(PROFILES)):
            rates = PROFILES[name]
            each["synthetic"] = await in_worker(engine, synthetic, list(rates))
            each[name] = {arm: await _drain(engine, arm, table, rates, lengths) for arm in rng.sample(arms, len(arms))}
        rounds.append(each)
        took = time.monotonic() - start
        found["over"] = {name: over_ours(rounds, name) for name in PROFILES}
        found["verdict"] = {name: verdict(over, len(rounds)) for name, over in found["over"].items()}
        bench.note(**found)


def draw_length(bench: Bench, rng: random.Random) -> int:
    """Tokens of a response: most are short, some are long, as where a policy ends its responses."""
    return rng.randint(4, 24) if bench.tiny else min(LONGEST, max(16, int(rng.lognormvariate(4.6, 0.75))))


async def _drain(
    engine: StandaloneEngine, arm: str, table: LatencyTable, rates: Sequence[float], lengths: Sequence[int]
) -> Drained:
    await hold(engine, int(arm.removeprefix(VLLM)) if arm.startswith(VLLM) else {NONE: OFF, OURS: None}[arm])
    if arm == OURS:
        await ask_scheduler(engine.llm, "control", points=table.to_list(), acceptance=list(rates))
    await stats(engine)
    rng = random.Random(0)
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(16)] for _ in lengths]
    start = time.perf_counter()
    await asyncio.gather(*(engine.generate(prompt, n) for prompt, n in zip(prompts, lengths, strict=True)))
    seconds, done = time.perf_counter() - start, await stats(engine)
    accept_length = 1 + sum(done.num_accepted_tokens_per_pos) / max(1, done.num_drafts)
    steps = {str(k): n for k, n in done.steps_by_draft_length.items()}
    return {"seconds": round(seconds, 4), "steps": steps, "accept_length": round(accept_length, 3)}


def over_ours(rounds: Sequence[Mapping[str, Any]], profile: str) -> dict[str, list[float]]:
    """Each other arm's seconds over ours, all rounds pooled: [ratio, low, high] (95 %)."""
    found = {}
    for arm in [NONE, *(arm for arm in rounds[0][profile] if arm != OURS)]:
        pairs = [(each[NONE] if arm == NONE else each[profile][arm], each[profile][OURS]) for each in rounds]
        found[arm] = ratio(pairs, lambda side: side["seconds"], lambda _: 1.0)
    return found
