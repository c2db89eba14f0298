"""A real vLLM engine for the benchmarks, in this process.

It decodes under one arm at a time: a draft-length policy under our scheduler, or a fixed K under vLLM's own. All arms
share the engine, since two processes with the same engine may differ by more than what is looked for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.control.policies import named
from verl_cpu.dtype import find_dtype
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.off import OffDecision
from verl_tlt.speculation.policies import LiveTablePolicy
from verl_tlt.speculation.types import Policy

ENVIRONMENT = CPU_ENGINE | {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Set it before torch and vLLM are imported."""
VLLM = "vllm-k"
"""Before a draft length: an arm under vLLM's own scheduler."""


@dataclass(frozen=True)
class Models:
    """What an engine serves, and how far it may go."""

    policy: Path
    """Its directory."""
    drafter: Path
    acceptance: list[float]
    """P(position i accepted | all before accepted), held out, temperature 1; as many positions as are known."""
    longest: int = 7
    """Longest draft, in tokens."""
    batch: int = 64
    """Most requests that decode at once."""
    context: int = 1536
    """Tokens of a prompt with its response."""
    block: int | None = None
    """Tokens of a block of vLLM's prefix cache, where `remember` is to find one."""
    end: int | None = None
    """The token that ends a response."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(range(self.longest + 1))


@dataclass(frozen=True)
class Decoded:
    """A batch that was decoded."""

    seconds: float
    lengths: tuple[int, ...]
    """Tokens of each response."""


class VllmTable(Policy):
    """vLLM's own way to vary K: a static table by batch size, here the best one for a calibration and an acceptance."""

    def __init__(self, known: LatencyTable, acceptance: Sequence[float], arms: Sequence[int], batch: int) -> None:
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        best = LiveTablePolicy(arms, batch)
        best.set_costs(known)
        best.set_acceptance(acceptance)
        self.schedule: list[list[int]] = []
        """As vLLM's `num_speculative_tokens_per_batch_size` takes it."""
        for size in range(1, batch + 1):
            k = best.choose(size)
            if self.schedule and self.schedule[-1][2] == k:
                self.schedule[-1][1] = size
            else:
                self.schedule.append([size, size, k])
        rows = [tuple(row) for row in self.schedule]
        self._lookup = build_dynamic_sd_schedule_lookup(rows, batch, arms[-1])

    def choose(self, batch: int) -> int:
        return self._lookup[batch]


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

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[object]:
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
    def __init__(self, models: Models) -> None:
        os.environ.update(ENVIRONMENT)
        import torch
        from verl.workers.rollout.vllm_rollout import utils
        from vllm import LLM

        from verl_tlt.config import TLTConfig
        from verl_tlt.server.engine_arguments import engine_kwargs

        torch.set_num_threads(1)
        utils.set_death_signal = lambda: None
        self.models = models
        tlt = TLTConfig.from_dict({"speculation": {"max_draft_length": models.longest, "policy": "live_table"}})
        self.llm = LLM(
            model=str(models.policy), skip_tokenizer_init=True, dtype=find_dtype(), enforce_eager=True, seed=0,
            max_model_len=models.context, max_num_seqs=models.batch, block_size=models.block,
            enable_prefix_caching=models.block is not None,
            distributed_executor_backend="uni",
            worker_extension_cls="verl_tlt.vllm_worker.extension.TLTWorkerExtension",
            **engine_kwargs(tlt, str(models.drafter), SimpleNamespace(enforce_eager=True), {}),
        )  # fmt: skip
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._ours, self._lookup = type(self.scheduler), self.scheduler.dynamic_sd_lookup
        self.arms: dict[str, Any] = {}
        self._decisions: dict[str, OffDecision] = {}
        self.decode([([1, 2, 3], 16)] * 2)

    # ------------------------------------------------------------------ decoding

    def decode(self, work: Sequence[tuple[list[int], int]], stop: Sequence[int] = (), greedy: bool = False) -> Decoded:
        """Decode a batch of (prompt, tokens of its response), or until a token of `stop`, at temperature 1 or 0."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        common = {"ignore_eos": True, "stop_token_ids": list(stop), "detokenize": False}
        params = [SamplingParams(max_tokens=n, temperature=float(not greedy), **common) for _, n in work]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Decoded(seconds, tuple(len(o.outputs[0].token_ids) for o in outputs))

    def sample(self, prompts: Sequence[list[int]], longest: int) -> Decoded:
        """Responses at temperature 1 up to the policy's own ends, of so many tokens at most."""
        stop = () if self.models.end is None else (self.models.end,)
        return self.decode([(prompt, longest) for prompt in prompts], stop)

    def remember(self, prompts: Sequence[list[int]]) -> None:
        """Compute these prompts, policy's and drafter's part, as far as the prefix cache does not hold them.

        Drains of them compute the last one or two blocks again (vLLM's `find_longest_cache_hit`, `use_eagle`).
        """
        self.use(f"{VLLM}1")
        self.decode([(prompt, 1) for prompt in prompts], greedy=True)

    # ------------------------------------------------------------------ control

    def set_drafting(self, enabled: bool) -> None:
        self.llm.collective_rpc("tlt_set_drafting", args=(enabled,))

    def calibrate(self, budget_s: float = 40.0, batches: Sequence[int] = (), context: int = 32) -> LatencyTable:
        """What a run measures at its start: at these batches, or at a run's; with so many tokens of context."""
        from verl_tlt.server import calibration

        engine: Any = _AsyncView(self)
        loads = [calibration.CalibrationLoad(batch, context) for batch in batches]
        loads = loads or calibration.loads_of(self.llm.llm_engine, self.models.longest)
        vocabulary = self.llm.model_config.get_vocab_size()
        return asyncio.run(calibration.calibrate(engine, self.models.lengths, loads, vocabulary, budget_s))

    def add_arm(self, name: str, known: LatencyTable) -> None:
        """An arm of the benchmark: `off` or a policy, told what a run would tell it.

        `live_table/OF` is one for a load or drafters of its own: what another learned of its own is no matter to it.
        """
        from verl_tlt.speculation.step_control import Limits, StepControl

        kind, arms = name.partition("/")[0], self.models.lengths
        told = (known, self.models.acceptance, arms, self.models.batch)
        policy = VllmTable(*told) if kind == "table" else named(kind, arms, self.models.batch)
        decision = self._decisions[name] = OffDecision([name], kind)
        decision.calibrated(known)
        control = self.arms[name] = StepControl(policy, Limits(arms))
        control.control(points=known.to_list(), acceptance=self.models.acceptance)
        control.drafting = name != "off"

    def use(self, name: str) -> None:
        """Decode under this arm from here on; `vllm-kN`: under vLLM's own scheduler with K=N in its table."""
        from vllm.v1.core.sched.scheduler import Scheduler

        own = name.startswith(VLLM)
        self.scheduler.__class__ = Scheduler if own else self._ours
        self.scheduler.dynamic_sd_lookup = (
            [int(name.removeprefix(VLLM))] * (self.models.batch + 1) if own else self._lookup
        )
        if not own:
            self.scheduler.tlt = self.arms[name]
        self.set_drafting(own or self.arms[name].drafting)

    # ------------------------------------------------------------------ what a run changes

    def publish(self, drafter: Path) -> None:
        loaded = self.llm.collective_rpc("tlt_load_drafter", args=(str(drafter),))[0]
        if not loaded["ok"]:
            raise ValueError(loaded["error"])

    def load_policy(self, directory: Path) -> None:
        """Other weights for the policy: those in a directory of the same shapes."""
        from safetensors.torch import load_file

        core = self.llm.llm_engine.engine_core.engine_core
        policy = core.model_executor.driver_worker.worker.model_runner.get_model()
        policy.load_weights(load_file(directory / "model.safetensors").items())

    def sync(self, name: str, acceptance: Sequence[float]) -> bool:
        """What a weight sync decides and tells an arm: whether the drafter runs, and how often it is accepted."""
        arm, decision = self.arms[name], self._decisions[name]
        if (stats := arm.stats(reset=True)).num_steps:
            decision.rollout_ended({name: stats})
        drafting = bool(decision.drafting(acceptance))
        self.set_drafting(drafting)
        arm.control(drafting=drafting, acceptance=list(acceptance))
        return drafting

    def stats(self, name: str) -> dict[str, Any]:
        return asdict(self.arms[name].stats(reset=True))
