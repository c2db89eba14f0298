"""A real vLLM engine for the benchmarks, in this process.

It decodes under one arm at a time: a draft-length policy under our scheduler, or a fixed K under vLLM's own. All arms
share the engine, since two processes with the same engine may differ by more than what is looked for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.control.drains import LONGEST, NONE, TABLE, VLLM
from verl_cpu.dtype import find_dtype
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.policies import FixedPolicy, LiveTablePolicy, make_policy
from verl_tlt.speculation.types import Policy, Step

ENVIRONMENT = CPU_ENGINE | {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Set it before torch and vLLM are imported."""
BLOCK = 16
"""Tokens of a block of the prefix cache, the fewest that vLLM takes on a CPU."""
LENGTHS = tuple(range(LONGEST + 1))


@dataclass(frozen=True)
class Models:
    """What an engine serves."""

    policy: Path
    """Its directory."""
    drafter: Path
    acceptance: list[float]
    """P(position i accepted | all before accepted), held out, temperature 1; as many positions as are known."""
    end: int
    """The token that ends a response."""


@dataclass(frozen=True)
class Decoded:
    """A batch that was decoded."""

    seconds: float
    lengths: tuple[int, ...]
    """Tokens of each response."""


class VllmTable(LiveTablePolicy):
    """vLLM's own way to vary K: a static table by batch size, here the best one for a calibration and an acceptance."""

    def observe(self, step: Step) -> None:
        """Learn nothing."""


class _AsyncView:
    """The part of vLLM's `AsyncLLM` that a calibration uses, over an in-process engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.engine_core, self.errored = engine, self, False
        self.vllm_config = engine.llm.llm_engine.vllm_config
        self._outputs: dict[str, list[Any]] = {}

    async def call_utility_async(self, name: str, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self._engine.scheduler, name)(operation, arguments)
        return answer

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return self._engine.llm.collective_rpc(method, args=args)

    async def reset_prefix_cache(self) -> None:
        self._engine.llm.reset_prefix_cache()

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: None) -> AsyncIterator[object]:
        """The outputs of a request, step by step; the request that has none left takes the next step for all."""
        engine, mine = self._engine.llm.llm_engine, self._outputs.setdefault(request_id, [])
        try:
            engine.add_request(request_id, prompt, params)
            finished = False
            while not finished:
                await asyncio.sleep(0)  # the others add their requests, and take their outputs of the last step
                while not mine and engine.has_unfinished_requests():
                    for output in engine.step():
                        self._outputs[output.request_id].append(output)
                output = mine.pop(0)
                yield output
                finished = output.finished
        finally:
            engine.abort_request([request_id])
            del self._outputs[request_id]


class Engine:
    """It has room for `batch` requests of `context` tokens."""

    def __init__(self, models: Models, batch: int, context: int) -> None:
        os.environ.update(ENVIRONMENT)
        import torch
        from verl.workers.rollout.vllm_rollout import utils
        from vllm import LLM

        from verl_tlt.config import TLTConfig
        from verl_tlt.server.engine_arguments import engine_kwargs

        torch.set_num_threads(1)
        utils.set_death_signal = lambda: None
        self.models, self.batch = models, batch
        tlt = TLTConfig.from_dict({"speculation": {"max_draft_length": LONGEST, "policy": "live_table"}})
        self.llm = LLM(
            model=str(models.policy), skip_tokenizer_init=True, dtype=find_dtype(), enforce_eager=True, seed=0,
            max_model_len=context, max_num_seqs=batch, block_size=BLOCK, enable_prefix_caching=True,
            distributed_executor_backend="uni",
            worker_extension_cls="verl_tlt.vllm_worker.extension.TLTWorkerExtension",
            **engine_kwargs(tlt, str(models.drafter), SimpleNamespace(enforce_eager=True), {}),
        )  # fmt: skip
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._ours, self._lookup = type(self.scheduler), self.scheduler.dynamic_sd_lookup
        self.arms: dict[str, Any] = {}
        self.decode([[1, 2, 3]] * 2, 16)

    def decode(self, prompts: Sequence[list[int]], tokens: int, *, ends: bool = False) -> Decoded:
        """A response of so many tokens to each prompt at temperature 1; `ends`: or up to the policy's own end."""
        from vllm import SamplingParams

        stop = [self.models.end] if ends else []
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, stop_token_ids=stop, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Decoded(seconds, tuple(len(o.outputs[0].token_ids) for o in outputs))

    def remember(self, prompts: Sequence[list[int]]) -> None:
        """Compute these prompts, policy's and drafter's part, as far as the prefix cache does not hold them.

        Drains of them compute the last one or two blocks again (vLLM's `find_longest_cache_hit`, `use_eagle`).
        """
        self.use(f"{VLLM}1")
        self.decode(prompts, 1)

    def calibrate(self, budget_s: float, batches: Sequence[int], context: int) -> LatencyTable:
        """Step costs as a run measures them at its start, at these batches with so many tokens of context."""
        from verl_tlt.server import calibration

        engine: Any = _AsyncView(self)
        loads = [calibration.CalibrationLoad(batch, context) for batch in batches]
        vocabulary = self.llm.model_config.get_vocab_size()
        return asyncio.run(calibration.calibrate(engine, LENGTHS, loads, vocabulary, budget_s, budget_s))

    def add_arm(self, name: str, known: LatencyTable) -> None:
        """An arm of the benchmark: `off` or a policy, told what a run would tell it.

        `live_table/OF` is one for a load of its own: what another learned of its own is no matter to it.
        """
        from verl_tlt.speculation.limits import Limits
        from verl_tlt.speculation.step_control import StepControl

        kind = name.partition("/")[0]
        if kind == NONE:
            policy: Policy = FixedPolicy(0)
        else:
            policy = VllmTable(LENGTHS, self.batch) if kind == TABLE else make_policy(kind, LENGTHS, self.batch)
        control = self.arms[name] = StepControl(policy, Limits(LENGTHS))
        control.control(points=known.to_list(), acceptance=self.models.acceptance, drafting=name != NONE)

    def use(self, name: str) -> None:
        """Decode under this arm from here on; `vllm-kN`: under vLLM's own scheduler with K=N in its table."""
        from vllm.v1.core.sched.scheduler import Scheduler

        own = name.startswith(VLLM)
        self.scheduler.__class__ = Scheduler if own else self._ours
        self.scheduler.dynamic_sd_lookup = [int(name.removeprefix(VLLM))] * (self.batch + 1) if own else self._lookup
        if not own:
            self.scheduler.tlt = self.arms[name]
        self.llm.collective_rpc("tlt_set_drafting", args=(own or self.arms[name].drafting,))

    def stats(self) -> EngineStats:
        """Of what the arm in use, a policy, did since the last call."""
        return from_plain(EngineStats, self.scheduler.tlt_call("stats", {"reset": True}))
