"""What a GPU changes for an engine with a drafter: sleep, sampling, and what a step costs.

    python -m benchmarks.gpu.engine --out FILE --budget 880

* small: one engine of a tiny policy. After verl's deepest sleep (level 2) and a reload, does the drafter accept as
  before (`sleep`)? Are tokens sampled at temperature 1 distributed alike with drafts and without, however long they are
  (`distribution`)? Are tokens still the policy's while the drafter computes NaN (`nan`)?
* lora: does an engine that serves an adapter draft, reload its drafter, and draft on?
* costs_stock_v1, costs_stock_v2: what a step of a 7B policy's shape takes by batch, with each of vLLM's model runners.
* costs_tlt: the same of an engine with a drafter, off and at each draft length.
* race: drains from 256 requests to one, with a chosen K, every fixed K and no drafts (`race.py`).
* beside: memory at each stage of a training session on the device of a sleeping engine, which then wakes.

Without a GPU: `--tiny`, which says of no figure that it is one of a GPU.
"""

import asyncio
import os
import re
from itertools import count
from typing import Any

from benchmarks.gpu.chi_square import compare
from benchmarks.gpu.engines import (
    ENVIRONMENT,
    K_MAX,
    accepted,
    adapter,
    any_length,
    hold,
    in_worker,
    live_digest,
    overwrite,
    prompts,
    sample,
    shaped_engine,
    stats,
    tiny_engine,
)
from benchmarks.gpu.parts import Bench, Part, attempt, main
from benchmarks.gpu.race import race
from verl_tlt.commands.child_engine import LOG
from verl_tlt.commands.doctor.standalone_engine import StandaloneEngine
from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import LoadReply
from verl_tlt.server.engine_arguments import started_lengths
from verl_tlt.speculation.types import OFF

BEGINNING = [1]
"""One prompt for all draws."""
BATCHES = (1, 4, 16, 64, 128)
TURNS = 3
SESSION_S = 180.0
"""Budget of the session beside an engine, its process and its buffer included."""


async def small(bench: Bench) -> dict[str, Any]:
    """`sleep`, `distribution` and `nan` in one engine; a check that fails leaves the others their turn."""
    found: dict[str, Any] = {}
    async with tiny_engine(bench) as engine:
        for check in (sleep, distribution, nan):
            try:
                found[check.__name__] = await check(bench, engine)
            except Exception as error:  # noted like a finding: what a GPU breaks is what is asked
                found[check.__name__] = {"error": f"{type(error).__name__}: {error}"}
            bench.note(**found)
    return found


async def sleep(bench: Bench, engine: StandaloneEngine) -> dict[str, Any]:
    """Acceptance before the sleep and after the reload, in verl's order; whether sleep lost weights or buffers."""
    assert engine.drafter is not None
    await hold(engine, K_MAX)
    found: dict[str, Any] = {"accepted_before": await accepted(engine)}
    before = await in_worker(engine, live_digest)
    found["memory_gib"] = {"awake": bench.memory()}
    await engine.llm.sleep(level=2)
    found["memory_gib"]["asleep"] = bench.memory()
    await engine.llm.wake_up(tags=["weights"])
    await engine.llm.collective_rpc("reload_weights")  # verl would send the policy's
    found["lost"] = await in_worker(engine, live_digest) != before
    reply = from_plain(LoadReply, await engine.rpc("tlt_load_drafter", str(engine.drafter / "model.safetensors")))
    await engine.llm.wake_up(tags=["kv_cache"])
    found |= {"reload_error": reply.error, "reload_s": round(reply.seconds, 3)}
    found["reload_is_exact"] = await in_worker(engine, live_digest) == before
    found["accepted_after"] = await accepted(engine)
    return found


async def nan(bench: Bench, engine: StandaloneEngine) -> dict[str, Any]:
    """Share of token 0 at temperature 1 without the drafter, and with one that has begun to compute NaN.

    Such a file is refused; this one goes wrong while it is live.
    """
    await hold(engine, OFF)
    without = await sample(engine, prompts(16), 64)
    await hold(engine, K_MAX)
    filled = await in_worker(engine, overwrite, float("nan"), "fc.weight")
    await stats(engine)
    tokens = await sample(engine, prompts(16), 64)
    done = await stats(engine)
    return {
        "filled": filled,
        "token_0_share_without_drafter": _share(without, 0),
        "token_0_share_with_nan_drafter": _share(tokens, 0),
        "drafts_verified": done.num_drafts,
        "drafts_accepted": sum(done.num_accepted_tokens_per_pos),
    }


def _share(outputs: list[list[int]], token: int) -> float:
    return round(sum(row.count(token) for row in outputs) / sum(map(len, outputs)), 4)


async def distribution(bench: Bench, engine: StandaloneEngine) -> dict[str, Any]:
    """Chi-square of outputs after one prompt, not drafted against drafted: with the longest drafts, and with lengths
    drawn anew in every step; and of two halves without drafts.

    The first token comes with the prompt, the others are drafted. The halves show what the test says of equals.
    """
    draws, tokens = (300, 4) if bench.tiny else (4000, 4)
    alike = [BEGINNING] * draws
    await hold(engine, OFF)
    plain = await sample(engine, alike, tokens)
    await hold(engine, K_MAX)
    await stats(engine)
    drafted = await sample(engine, alike, tokens)
    done = await stats(engine)
    async with any_length(engine):
        drawn = await sample(engine, alike, tokens)
    varied = await stats(engine)
    return {
        "draws": draws,
        "tokens": tokens,
        "drafts": done.num_drafts,
        "accepted": list(done.num_accepted_tokens_per_pos),
        "steps_by_drawn_length": dict(varied.steps_by_draft_length),
        "drafted_against_plain": compare(drafted, plain),
        "drawn_against_plain": compare(drawn, plain),
        "plain_against_plain": compare(plain[::2], plain[1::2]),
    }


async def lora(bench: Bench) -> dict[str, Any]:
    """An engine that serves the policy with an adapter: acceptance before and after a sleep and a reload, in the order
    of verl, which leaves such a policy's weights on the host; and what it samples with drafts and without.
    """
    draws, tokens = (300, 4) if bench.tiny else (4000, 4)
    async with tiny_engine(bench, enable_lora=True, max_lora_rank=8, max_loras=1) as engine:
        assert engine.drafter is not None
        with_it, alike = adapter(bench), [BEGINNING] * draws
        file = str(engine.drafter / "model.safetensors")
        await engine.rpc("tlt_load_drafter", file)  # as with a run's first weight sync
        await hold(engine, OFF)
        plain = await sample(engine, alike, tokens, with_it)
        await hold(engine, K_MAX)
        found: dict[str, Any] = {"accepted_before": await accepted(engine, with_it)}
        await engine.llm.sleep(level=1)
        await engine.llm.wake_up(tags=["weights"])
        reply = from_plain(LoadReply, await engine.rpc("tlt_load_drafter", file))
        await engine.llm.wake_up(tags=["kv_cache"])
        found |= {"reload_error": reply.error, "accepted_after": await accepted(engine, with_it)}
        drafted = await sample(engine, alike, tokens, with_it)
    return {**found, "drafted_against_plain": compare(drafted, plain)}


# ---------------------------------------------------------------------- a 7B policy's shape


async def step_costs(bench: Bench, drafting: bool = True) -> dict[str, Any]:
    """Milliseconds of a step by arm and batch, every turn of them.

    `stock` has no drafter. It, off and K=0 are timed on the wall clock, alike; each arm with a drafter also on the
    engine's own clock (medians of clean steps), since a request may gain several tokens a step.
    """
    batches = (1, 2) if bench.tiny else BATCHES
    found: dict[str, Any] = {"runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"), "wall_ms": {}, "engine_ms": {}}
    async with shaped_engine(bench, drafting=drafting) as engine:
        arms = [OFF, *started_lengths(engine.llm)] if drafting else [None]
        for arm in arms:
            if arm is not None:
                await hold(engine, arm)
            name = {None: "stock", OFF: "off"}.get(arm, f"K={arm}")
            for batch in batches:
                await engine.step_seconds(batch, tokens=8)  # the first use of a batch compiles and allocates
                turns = [await _turn(engine, batch, arm) for _ in range(TURNS)]
                if arm in (None, OFF, 0):
                    found["wall_ms"].setdefault(name, {})[batch] = [wall for wall, _ in turns]
                if arm is not None:
                    found["engine_ms"].setdefault(name, {})[batch] = [own for _, own in turns]
    found["graph_gib"] = graph_memory_gib((bench.directory / LOG).read_text(errors="replace"))
    return found


def graph_memory_gib(log: str) -> list[float]:
    """What vLLM says in its log that captured CUDA graphs take, one figure for each engine started."""
    return [float(x) for x in re.findall(r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB", log)]


async def _turn(engine: StandaloneEngine, batch: int, arm: int | None) -> tuple[float, float | None]:
    """(milliseconds of a step on the wall clock, the same on the engine's; None: no clean step)."""
    if arm is None:
        return round(1e3 * await engine.step_seconds(batch), 3), None
    await stats(engine)
    wall = await engine.step_seconds(batch)
    times = (await stats(engine)).step_times
    own = next((1e3 * t.seconds for t in times if (t.draft_length, t.batch) == (arm, batch)), None)
    return round(1e3 * wall, 3), None if own is None else round(own, 3)


async def beside(bench: Bench) -> dict[str, Any]:
    """Sessions of the real learner on the device of a sleeping engine, which then wakes and decodes."""
    memory: dict[str, Any] = {}
    async with shaped_engine(bench) as engine:
        await hold(engine, 1)
        await engine.generate(range(1, 9), 4)
        memory["awake"] = bench.memory()
        await engine.llm.sleep(level=2)
        memory["asleep"] = bench.memory()
        session = await asyncio.to_thread(_session, bench, memory)
        memory["after the session"] = bench.memory()
        await engine.llm.wake_up(tags=["weights"])
        assert engine.drafter is not None
        reply = await engine.rpc("tlt_load_drafter", str(engine.drafter / "model.safetensors"))
        assert reply["ok"], reply
        await engine.llm.wake_up(tags=["kv_cache"])
        memory["awake again"] = bench.memory()
        await engine.generate(range(1, 9), 16)
    return {"memory_gib": memory, "session": session, "decodes_afterwards": True}


def _session(bench: Bench, memory: dict[str, Any]) -> dict[str, Any]:
    """The part `stop` of `benchmarks.gpu.drafter`; memory is noted while it goes on."""
    from benchmarks.gpu.drafter import PARTS

    seconds = count(1)

    def tell() -> None:
        if (second := next(seconds)) % 5 == 0:
            memory[f"in the session, {second} s"] = bench.memory()

    return attempt("benchmarks.gpu.drafter", "stop", PARTS["stop"], bench.tiny, bench.directory, SESSION_S, tell)


def _runner(version: int) -> dict[str, str]:
    return {**ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": str(version - 1)}


PARTS = {
    "small": Part(small, 90, most_s=240, environment=ENVIRONMENT),
    "lora": Part(lora, 60, environment=ENVIRONMENT),
    "costs_stock_v1": Part(lambda bench: step_costs(bench, drafting=False), 90, environment=_runner(1)),
    "costs_stock_v2": Part(lambda bench: step_costs(bench, drafting=False), 90, cuda_only=True, environment=_runner(2)),
    "costs_tlt": Part(step_costs, 90, environment=ENVIRONMENT),
    "beside": Part(beside, 240, environment=ENVIRONMENT),
    "race": Part(race, 180, environment=ENVIRONMENT),
}
"""In the order of what a user meets first."""

if __name__ == "__main__":
    main("benchmarks.gpu.engine", PARTS, __doc__)
