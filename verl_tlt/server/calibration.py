"""Measures at start what an engine step costs by draft length, batch and context, OFF included.

The engine decodes random prompts with the draft length held, and its own step statistics give the medians.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from verl_tlt.errors import DrafterError
from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.server.engine_calls import answered, ask_scheduler
from verl_tlt.speculation.costs import SHORT_CONTEXT, LatencyPoint, LatencyTable
from verl_tlt.speculation.types import OFF

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

STEPS = 8
"""Steps of a measurement, whose median is taken: with 8 it is known to 1 % where single steps vary by 3 %."""
LEAST_STEPS = 3
"""Steps of a measurement that has used up its share of the budget: with fewer steps each, every load is reached."""
BUDGET_S = 30.0
"""Seconds that a calibration should take: each measurement has a share of them."""
LIMIT_S = 180.0
"""Seconds after which a calibration ends with what it has. Where steps are so slow, an RL step takes minutes, and where
few batches were measured, the best K of the others is not known."""
LONG_TOKENS = 65_536
"""Tokens of context of all requests together in a measurement, at most: an H100 computes so many prompt tokens in 3 s
for a policy of 8B."""


class CalibrationLoad(NamedTuple):
    """What every draft length is measured at."""

    batch: int
    context: int  # tokens of a request

    @property
    def kv_tokens(self) -> int:
        return self.batch * self.context


def plan_loads(max_num_seqs: int, longest_context: int, cache_tokens: int) -> list[CalibrationLoad]:
    """Loads to measure: powers of two and `max_num_seqs` at a short context, every third of them at a long one.

    `longest_context`: tokens of prompt and response; `cache_tokens`: what the KV cache holds. The smallest and the
    largest batch come first, then the long context of one request, so that a calibration that runs out of time has
    measured both ends of the range.
    """
    powers = [1 << i for i in range(max_num_seqs.bit_length())]
    batches = sorted({*powers, max_num_seqs})
    ends = [batches[0], batches[-1]]
    short = [CalibrationLoad(batch, SHORT_CONTEXT) for batch in dict.fromkeys(ends + batches)]
    most_tokens = min(LONG_TOKENS, cache_tokens // 2)
    long = []
    for batch in dict.fromkeys(ends + batches[::3]):
        context = min(longest_context, most_tokens // batch)
        if context >= 2 * SHORT_CONTEXT:
            long.append(CalibrationLoad(batch, context))
    return [*short[:2], *long[:1], *short[2:], *long[1:]]


def affordable(load: CalibrationLoad, within_s: float, token_s: float) -> CalibrationLoad | None:
    """The load, with a context so short that its prompts take at most `within_s` seconds; None: no long context does.

    `token_s` is the seconds that a token of a prompt takes; 0: not known, and the load stays as it is.
    """
    if load.context == SHORT_CONTEXT:
        return load
    if within_s <= 0.0:
        return None
    if not token_s:
        return load
    context = min(load.context, int(within_s / token_s) // load.batch)
    return CalibrationLoad(load.batch, context) if context >= 2 * SHORT_CONTEXT else None


def loads_of(engine: AsyncLLM, longest_draft: int) -> list[CalibrationLoad]:
    """`plan_loads` for a live engine."""
    config = engine.vllm_config
    longest = config.model_config.max_model_len - STEPS * (longest_draft + 1)
    cache_tokens = (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size
    return plan_loads(config.scheduler_config.max_num_seqs, longest, cache_tokens)


def sampling_of(rollout: RolloutConfig) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams` with which a rollout samples: they are part of what a step costs.

    With `logprobs` vLLM computes those of every verified token, and with `top_p` or `top_k` it sorts the vocabulary.
    """
    logprobs = 0 if rollout.calculate_log_probs else None
    return {
        "temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k, "logprobs": logprobs,
    }  # fmt: skip


async def calibrate(
    engine: AsyncLLM,
    lengths: Sequence[int],
    loads: Sequence[CalibrationLoad],
    vocab_size: int,
    budget_s: float = BUDGET_S,
    limit_s: float = LIMIT_S,
    sampling: Mapping[str, Any] = MappingProxyType({"temperature": 1.0}),
    lora: LoRARequest | None = None,
) -> LatencyTable:
    """Measure step costs of a live engine without other work; leave it drafting, unforced, its prefix cache empty.

    Requests are sampled with `sampling`, and have the adapter `lora`. Steps too slow for `budget_s` are measured less
    often at each load, and contexts are shorter or left out. After `limit_s` seconds no further load is begun; the
    first one always is. A draft length without a clean step at a load has no point there. `SchedulerCallError` where
    nobody answers.
    """
    measurement = _Measurement(engine, vocab_size, sampling, lora)
    all_lengths = (OFF, *lengths)
    begun = time.monotonic()
    deadline = begun + budget_s
    points: list[LatencyPoint] = []
    try:
        # The first use of a draft length compiles, allocates, and finds the machine cold.
        for length in all_lengths:
            await measurement.seconds(length, loads[0], 0.0)
        for done_loads, planned in enumerate(loads):
            left_s = deadline - time.monotonic()
            if done_loads > 0 and time.monotonic() - begun > limit_s:
                logger.info("The calibration ends after %.0f s with %d of %d loads.", limit_s, done_loads, len(loads))
                break
            loads_left = len(loads) - done_loads
            prompt_passes = 2 if measurement.caches_prompts else 2 * len(all_lengths)
            load = affordable(planned, left_s / loads_left / prompt_passes, measurement.token_s)
            if load is None:
                continue
            for done_lengths, length in enumerate(all_lengths):
                measurements_left = loads_left * len(all_lengths) - done_lengths
                share_s = (deadline - time.monotonic()) / measurements_left
                seconds = await measurement.seconds(length, load, share_s)
                if seconds is not None:
                    points.append(LatencyPoint(load.batch, load.kv_tokens, length, seconds))
    finally:
        await measurement.release()
    return LatencyTable(tuple(points))


async def draft_once(engine: AsyncLLM, length: int, vocab_size: int, lora: LoRARequest | None = None) -> None:
    """Have a live engine verify a few drafts of `length` tokens; an exception where it dies of them.

    The other arguments, and the state in which the engine is left, are those of `calibrate`.
    """
    measurement = _Measurement(engine, vocab_size, {}, lora)
    try:
        await measurement.seconds(length, CalibrationLoad(1, SHORT_CONTEXT), math.inf)
    finally:
        await measurement.release()


async def decode(
    engine: AsyncLLM,
    prompt: Sequence[int],
    media: Mapping[str, Any] | None = None,
    enough: Callable[[int], bool] = lambda outputs: False,
    lora: LoRARequest | None = None,
    **sampling: Any,
) -> list[int]:
    """The tokens of one response to `prompt`; `sampling` are fields of vLLM's `SamplingParams`.

    `media` are further fields of vLLM's prompt: images, and how they are cut. `lora` is the adapter of the policy that
    answers; None: its base. `enough` is called with the number of outputs that the engine has sent so far, of which the
    first is the prompt's. The request is aborted once it returns True.
    """
    from vllm import SamplingParams

    params = SamplingParams(detokenize=False, **sampling)
    request = {"prompt_token_ids": list(prompt), **(media or {})}
    answers = engine.generate(request, params, request_id=uuid4().hex, lora_request=lora)
    last = None
    seen = 0
    async with contextlib.aclosing(answers) as outputs:
        async for output in outputs:
            last = output
            seen += 1
            if enough(seen):
                break
    return list(last.outputs[0].token_ids) if last and last.outputs else []


class _Steps:
    """Tells requests to end after enough steps in which all of them decode.

    All of them decode from the first output of the last request on, so that request's outputs are counted.
    """

    def __init__(self, requests: int, ends: float) -> None:
        self._requests_without_output = requests
        self._ends = ends  # after this time, by `time.monotonic`, `LEAST_STEPS` are enough
        self._enough = False

    def of_request(self) -> Callable[[int], bool]:
        """Make one request's `enough`, as `decode` takes it."""
        is_last = False

        def enough(outputs: int) -> bool:
            nonlocal is_last
            if outputs == 1:
                self._requests_without_output -= 1
                is_last = self._requests_without_output == 0
            if is_last:
                steps = outputs - 2  # without the prompt's output, and without a step in which others may be late
                late = time.monotonic() > self._ends
                self._enough = steps >= (LEAST_STEPS if late else STEPS)
            return self._enough

        return enough


class _Measurement:
    """Holds an engine at one draft length and reads its step times."""

    def __init__(
        self, engine: AsyncLLM, vocab_size: int, sampling: Mapping[str, Any], lora: LoRARequest | None
    ) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._sampling = dict(sampling)
        self._lora = lora
        self._rng = random.Random(0)
        self._drafting: bool | None = None
        self._prompts: dict[CalibrationLoad, list[list[int]]] = {}
        self.caches_prompts = bool(engine.vllm_config.cache_config.enable_prefix_caching)
        """True: a load's prompts are computed once without the drafter and once with it. False: twice for each draft
        length."""
        self.token_s = 0.0
        """Seconds that the engine takes for a token of a long prompt; 0: not known yet."""

    async def seconds(self, length: int, load: CalibrationLoad, share_s: float) -> float | None:
        """Median seconds of `LEAST_STEPS` to `STEPS` clean steps at exactly this batch and length; None without one.

        A measurement that has taken `share_s` seconds ends after `LEAST_STEPS`.
        """
        ends = time.monotonic() + share_s
        cache_was_emptied = await self._hold(length)
        per_step = max(length, 0) + 1  # tokens that a request may gain
        # Tokens of a prompt: half way through the measurement, a request has the load's context.
        context = max(1, load.context - STEPS * per_step // 2 - 1)
        if context > SHORT_CONTEXT:
            await self._compute_prompts(load, context, ends, timed=cache_was_emptied)
        config = self._engine.vllm_config.scheduler_config
        # The first requests decode while the last prompts are computed, and must be there until enough steps were seen.
        most_steps = 2 + math.ceil(load.batch * context / config.max_num_batched_tokens) + STEPS
        await ask_scheduler(self._engine, "stats", reset=True)
        await self._decode(load, context, most_steps * per_step, ends)
        stats = from_plain(EngineStats, await ask_scheduler(self._engine, "stats", reset=True))
        for step_time in stats.step_times:
            if step_time.draft_length == length and step_time.batch == load.batch:
                return step_time.seconds
        return None

    async def _compute_prompts(self, load: CalibrationLoad, context: int, ends: float, *, timed: bool) -> None:
        """Compute prompts into the prefix cache, so that all requests begin to decode together in the measurement.

        `timed`: the cache has none of them yet, so their time tells how long a token takes (`token_s`).
        """
        begun = time.monotonic()
        await self._decode(load, context, 1, ends)
        if timed:
            token_s = (time.monotonic() - begun) / (load.batch * context)
            self.token_s = min(self.token_s or token_s, token_s)  # the first prompts may find the engine cold

    async def release(self) -> None:
        await self._set_drafting(True)
        await ask_scheduler(self._engine, "control", drafting=True, force_k=None)

    async def _hold(self, length: int) -> bool:
        """Hold the draft length; returns whether that has emptied the prefix cache."""
        drafting = length != OFF
        emptied = drafting != self._drafting
        if emptied:
            await self._set_drafting(drafting)
            self._drafting = drafting
        await ask_scheduler(self._engine, "control", drafting=drafting, force_k=max(length, 0))
        return emptied

    async def _set_drafting(self, enabled: bool) -> None:
        """Switch the drafter's own pass on or off; a `DrafterError` where it can run no more."""
        asked = self._engine.collective_rpc(method="tlt_set_drafting", args=(enabled,))
        for failure in await answered(self._engine, "switch its drafter", asked):
            if failure is not None:
                raise DrafterError(failure)
        # The drafter's cache has holes where it did not run; start both ways from nothing.
        await answered(self._engine, "clear its cache", self._engine.reset_prefix_cache())

    async def _decode(self, load: CalibrationLoad, context: int, tokens: int, ends: float) -> None:
        if load not in self._prompts:  # one load is measured after the other
            of_load = [self._rng.choices(range(self._vocab_size), k=load.context) for _ in range(load.batch)]
            self._prompts = {load: of_load}
        prompts = [prompt[:context] for prompt in self._prompts[load]]
        steps = _Steps(load.batch, ends)
        sampling = self._sampling | {"max_tokens": tokens, "ignore_eos": True}
        asked = (decode(self._engine, p, enough=steps.of_request(), lora=self._lora, **sampling) for p in prompts)
        await answered(self._engine, "decode", asyncio.gather(*asked))
