"""What steps of an engine of real shape cost, and what it leaves to a training session while it sleeps."""

import asyncio
import os
import re
from itertools import count
from typing import Any

from benchmarks.gpu.engines import hold, shaped_engine, stats
from benchmarks.gpu.parts import NEEDS_CUDA, Bench, attempt, device_memory
from verl_tlt.commands.child_engine import LOG
from verl_tlt.commands.doctor.standalone_engine import StandaloneEngine
from verl_tlt.server.engine_arguments import started_lengths
from verl_tlt.speculation.types import OFF

BATCHES = (1, 4, 16, 64, 128)
TURNS = 3
SESSION_S = 180.0
"""Budget of the session beside an engine, its process and its buffer included."""


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

    def note(stage: str) -> None:
        memory[stage] = device_memory() if bench.cuda else NEEDS_CUDA

    async with shaped_engine(bench) as engine:
        await hold(engine, 1)
        await engine.generate(range(1, 9), 4)
        note("awake")
        await engine.llm.sleep(level=2)
        note("asleep")
        session = await asyncio.to_thread(_session, bench, note)
        note("after the session")
        await engine.llm.wake_up(tags=["weights"])
        assert engine.drafter is not None
        reply = await engine.rpc("tlt_load_drafter", str(engine.drafter / "model.safetensors"))
        assert reply["ok"], reply
        await engine.llm.wake_up(tags=["kv_cache"])
        note("awake again")
        await engine.generate(range(1, 9), 16)
    return {"memory_gib": memory, "session": session, "decodes_afterwards": True}


def _session(bench: Bench, note: Any) -> dict[str, Any]:
    """The part `stop` of `benchmarks.gpu.drafter`; memory is noted while it goes on."""
    from benchmarks.gpu.drafter import PARTS

    seconds = count(1)

    def tell() -> None:
        if (second := next(seconds)) % 5 == 0:
            note(f"in the session, {second} s")

    return attempt("benchmarks.gpu.drafter", "stop", PARTS["stop"], bench.tiny, bench.directory, SESSION_S, tell)
