"""Measures at start what an engine step costs by batch and draft length, OFF included.

The engine decodes short random prompts at a few batches with the draft length held, and its own step statistics give
the medians. Costs are close to linear in K, so four draft lengths suffice; the others are interpolated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from verl_tlt.drafter.policy import folder
from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.server.engine_calls import answered, ask_scheduler
from verl_tlt.speculation.costs.tables import LatencyTable, TableKey
from verl_tlt.speculation.types import OFF
from verl_tlt.upstream.versions import installed

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 32)
STEPS, ROUNDS = 4, 2
"""Clean steps of each probe, whose median is taken, and probes of each load, at different times."""
PROMPT_TOKENS = 16


def cost_key(config: VllmConfig, policy: str, drafter: Path | None = None) -> TableKey:
    """Key of a table of step costs: hardware, policy, drafter, vLLM's release and what the engine runs with.

    `config` is a running engine's, as vLLM resolved it from whatever it was started with. `policy` is a local directory
    or a name on the hub, of which the configuration counts; `drafter` a directory, of which the sizes count (None:
    n-grams alone).
    """
    from vllm.platforms import current_platform

    device = _cpu_name() if current_platform.is_cpu() else current_platform.get_device_name()
    file = folder(policy, ("config.json",)) / "config.json"
    shape = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    drafts = "n-grams" if drafter is None else f"drafter {_drafter_sizes(drafter)}"
    model = f"policy {shape} {drafts} {_runs_with(config)}"
    devices = config.parallel_config.tensor_parallel_size * config.parallel_config.pipeline_parallel_size
    return TableKey(f"{device} x{devices}", model, installed("vllm") or "")


def _runs_with(config: VllmConfig) -> str:
    model, compilation, lora = config.model_config, config.compilation_config, config.lora_config
    parallel = config.parallel_config
    mode = "NONE" if model.enforce_eager else getattr(compilation.cudagraph_mode, "name", "NONE")
    parts = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "kv": config.cache_config.cache_dtype,
        "tensor parallel": parallel.tensor_parallel_size,
        "context parallel": parallel.decode_context_parallel_size,
        "expert parallel": parallel.enable_expert_parallel,
        "longest draft": config.num_speculative_tokens,  # to whose multiples graphs are padded
        "compilation": "none" if model.enforce_eager else getattr(compilation.mode, "name", compilation.mode),
        "graphs": mode,
        "attention": getattr(config.attention_config.backend, "name", None) or "auto",
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "scheduling": "async" if config.scheduler_config.async_scheduling else "sync",
        "LoRA": lora.max_lora_rank if lora else None,
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)


def _drafter_sizes(directory: Path) -> str:
    """Width of MLP and draft vocabulary, in which drafters of one policy may differ; a policy has one MTP head."""
    config = json.loads((directory / "config.json").read_text())
    if config.get("speculators_model_type") == "mtp":
        return "mtp"
    return f"{config['transformer_layer_config']['intermediate_size']}x{config['draft_vocab_size']}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name} ({os.cpu_count()} cores)"


def plan_lengths(lengths: Sequence[int]) -> list[int]:
    """Draft lengths to measure: OFF, the ends of the range, 1 (the step from 0 to 1 is the largest), one in between.

    With CUDA graphs these are all lengths of an engine: a run would spend its first steps on trying guessed ones.
    """
    longest = max(lengths)
    between = [k for k in lengths if 1 < k < longest]
    chosen = [OFF, 0, longest, 1, *sorted(between, key=lambda k: abs(k * k - longest))[:1]]
    return [k for i, k in enumerate(chosen) if (k == OFF or k in lengths) and k not in chosen[:i]]


def plan_batches(max_batch: int) -> list[int]:
    """Batches to measure, ends first, so that a measurement cut short still spans the range."""
    batches = [b for b in BATCHES if b <= max_batch] or [1]
    return [batches[0], batches[-1], *batches[-2:0:-1]] if len(batches) > 1 else batches


async def calibrate(
    engine: AsyncLLM, lengths: Sequence[int], batches: Sequence[int], vocab_size: int, budget_s: float = 20.0
) -> LatencyTable:
    """Measure step costs of a live engine without other work; leave it drafting, unforced, its prefix cache empty.

    A draft length between measured ones is interpolated, one without a clean step is missing. `batches` are measured in
    their order, and none but the first after `budget_s` seconds. `SchedulerCallError` where nobody answers.
    """
    probe = _Prober(engine, vocab_size)
    deadline = time.monotonic() + budget_s
    measured: dict[tuple[int, int], float] = {}
    try:
        # The first use of a draft length compiles, allocates, and finds the machine cold.
        usable = plan_lengths(lengths)
        for length in usable:
            await probe.warm(length, batches)
        # All lengths of a batch in a row, in alternating order, so that a busy machine slows them alike.
        turns = [usable if turn % 2 == 0 else usable[::-1] for turn in range(ROUNDS)]
        for n, (batch, length) in enumerate((batch, length) for turn in turns for batch in batches for length in turn):
            if time.monotonic() > deadline and n >= len(usable):  # one batch at least, however slow the machine
                logger.info("calibration stopped after %.0f s with %d loads measured", budget_s, len(measured))
                break
            seconds = await probe.seconds(length, batch)
            if seconds is not None:
                # A step may be held up, but is never too fast: the lower median is nearer the truth.
                measured[length, batch] = min(seconds, measured.get((length, batch), seconds))
    finally:
        await probe.release()
    return _table(measured, lengths)


async def draft_once(engine: AsyncLLM, length: int, vocab_size: int) -> None:
    """Have a live engine verify a few drafts of the longest kind; an exception where it dies of them.

    `engine` and `vocab_size` are as for `calibrate`, which leaves the engine in the same state.
    """
    probe = _Prober(engine, vocab_size)
    try:
        await probe.warm(length, [1])
    finally:
        await probe.release()


async def decode(engine: AsyncLLM, prompt: Sequence[int], **sampling: Any) -> list[int]:
    """The tokens of one response to `prompt`; `sampling` are fields of vLLM's `SamplingParams`."""
    from vllm import SamplingParams

    params, last = SamplingParams(detokenize=False, **sampling), None
    async for output in engine.generate({"prompt_token_ids": list(prompt)}, params, request_id=uuid4().hex):
        last = output
    return list(last.outputs[0].token_ids) if last and last.outputs else []


def _table(measured: Mapping[tuple[int, int], float], lengths: Sequence[int]) -> LatencyTable:
    rows: dict[int, list[tuple[int, float]]] = {}
    for (length, batch), seconds in sorted(measured.items()):
        # A step in OFF is a part of one at K=0: where it took longer, it was held up.
        least = min(seconds, measured.get((0, batch), seconds)) if length == OFF else seconds
        rows.setdefault(length, []).append((batch, least))
    return LatencyTable.calibrated(rows).for_lengths(lengths)


class _Prober:
    """Holds an engine at one draft length and reads its step times."""

    def __init__(self, engine: AsyncLLM, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._rng = random.Random(0)
        self._drafting: bool | None = None

    async def warm(self, length: int, batches: Sequence[int]) -> None:
        """Use a draft length once at the range's ends, the first two batches."""
        await self._hold(length)
        for batch in batches[:2]:
            await self._decode(batch, 2 + 2 * (max(length, 0) + 1))

    async def seconds(self, length: int, batch: int) -> float | None:
        """Median seconds of the clean steps at exactly this batch and length; None if there was none."""
        await self._hold(length)
        await ask_scheduler(self._engine, "stats", reset=True)
        # A request may gain length + 1 tokens a step; all must still be there when enough steps have been seen.
        await self._decode(batch, 2 + STEPS * (max(length, 0) + 1))
        stats = from_plain(EngineStats, await ask_scheduler(self._engine, "stats", reset=True))
        return next((t.seconds for t in stats.step_times if (t.draft_length, t.batch) == (length, batch)), None)

    async def release(self) -> None:
        await self._set_drafting(True)
        await ask_scheduler(self._engine, "control", drafting=True, force_k=None)

    async def _hold(self, length: int) -> None:
        drafting = length != OFF
        if drafting != self._drafting:
            await self._set_drafting(drafting)
            self._drafting = drafting
        await ask_scheduler(self._engine, "control", drafting=drafting, force_k=max(length, 0))

    async def _set_drafting(self, enabled: bool) -> None:
        """Switch the drafter's own pass on or off."""
        asked = self._engine.collective_rpc(method="tlt_set_drafting", args=(enabled,))
        await answered(self._engine, "switch its drafter", asked)
        # The drafter's cache has holes where it did not run; start both ways from nothing.
        await answered(self._engine, "clear its cache", self._engine.reset_prefix_cache())

    async def _decode(self, batch: int, tokens: int) -> None:
        prompts = [[self._rng.randrange(self._vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        asked = (decode(self._engine, p, temperature=1.0, max_tokens=tokens, ignore_eos=True) for p in prompts)
        await answered(self._engine, "decode", asyncio.gather(*asked))
