"""Real vLLM engines for the benchmarks, each in a process of its own, driven one at a time over a pipe.

Two kinds share one machine, so that they can be compared within one run: `tlt` is vLLM under our scheduler, `stock` is
vLLM without any drafter. vLLM with the drafter and its own static table that says K=0 is an arm of `tlt`, since two
processes with the same engine may differ by more than what is looked for.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.control.policies import RIVALS, named
from benchmarks.control.toy import LONGEST_DRAFT, Toy
from demo.machine import find_dtype
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.decision import Limits, RolloutDecision
from verl_tlt.speculation.types import Load, StepRecord

ENVIRONMENT = CPU_ENGINE | {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
BATCH = 64
ARMS = tuple(range(LONGEST_DRAFT + 1))
CONTEXT = 1536
"""Tokens of a prompt with its response, as in the demo's recipe."""
VLLM = "vllm-k"
"""Before a draft length: an arm under vLLM's own scheduler."""
VLLM_ZERO = f"{VLLM}0"
START_TIMEOUT_S = 3600.0
CALL_TIMEOUT_S = 3600.0


def problems(seed: int, batch: int = BATCH) -> list[tuple[list[int], int]]:
    """Prompts of the toy's task and how long a response to each is, as long-tailed as in the demo: [(token ids, n)]."""
    from demo.toy import task

    rng = random.Random(seed)
    drawn = [task.sample_problem(rng) for _ in range(batch)]
    return [([task.TOKEN_ID[w] for w in task.prompt_tokens(p)], task.sample_length(p, rng)) for p in drawn]


class EngineProcess:
    """One engine in a child process; `call` runs a method of `_Engine` there."""

    def __init__(self, kind: str, toy: Toy, scratch: Path, clock: str = "wall") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, toy, scratch, clock), daemon=True)
        self._process.start()
        self._answer(START_TIMEOUT_S)

    def call(self, method: str, **arguments: Any) -> Any:
        """Result of `_Engine.method(**arguments)`; RuntimeError with its text where it raised."""
        self._pipe.send((method, arguments))
        return self._answer(CALL_TIMEOUT_S)

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._pipe.send(("stop", {}))
            self._process.join(30.0)
            self._process.kill()

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"A benchmark engine did not answer within {timeout_s:.0f} s.")
        error, value = self._pipe.recv()
        if error:
            raise RuntimeError(error)
        return value


def _serve(pipe: Connection, kind: str, toy: Toy, scratch: Path, clock: str) -> None:
    os.environ.update(ENVIRONMENT)
    try:
        engine = _Engine(kind, toy, scratch, clock)
        pipe.send((None, None))
        while (message := pipe.recv())[0] != "stop":
            pipe.send((None, getattr(engine, message[0])(**message[1])))
    except Exception as error:  # the other side raises it
        pipe.send((f"{type(error).__name__}: {error}", None))
        raise


class VllmTable:
    """vLLM's own way to vary K: a static table by batch size, here the best one for a calibration and an acceptance."""

    def __init__(self, known: LatencyTable, acceptance: Sequence[float], arms: Sequence[int], batch: int) -> None:
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        best = named("table", tuple(arms))
        best.set_latency(known)
        best.set_acceptance(acceptance)
        self.schedule: list[list[int]] = []
        """As vLLM's `num_speculative_tokens_per_batch_size` takes it."""
        for size in range(1, batch + 1):
            k = best.choose(Load(size, size * 150))
            if self.schedule and self.schedule[-1][2] == k:
                self.schedule[-1][1] = size
            else:
                self.schedule.append([size, size, k])
        self._lookup = build_dynamic_sd_schedule_lookup(
            [tuple(row) for row in self.schedule], vllm_max_batch_size=batch, vllm_num_speculative_tokens=arms[-1]
        )

    def choose(self, load: Load) -> int:
        """What vLLM would look up."""
        return int(self._lookup[load.batch]) if load.batch else 0

    def observe(self, step: StepRecord) -> None:
        """A static table learns nothing."""


class _AsyncView:
    """The part of vLLM's `AsyncLLM` that a calibration uses, over an in-process engine."""

    def __init__(self, engine: _Engine) -> None:
        self._engine, self.engine_core, self.errored = engine, self, False
        self._waiting: list[tuple[Any, Any]] = []

    async def call_utility_async(self, name: str, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self._engine.scheduler, name)(operation, arguments)
        return answer

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return self._engine.llm.collective_rpc(method, args=args)

    async def reset_prefix_cache(self) -> None:
        """The engine keeps none."""

    async def generate(self, prompt: object, params: object, request_id: str) -> AsyncIterator[object]:
        """Decode together whatever was asked for at once."""
        self._waiting.append((prompt, params))
        await asyncio.sleep(0)
        batch, self._waiting = self._waiting, []
        if batch:
            yield self._engine.llm.generate([p for p, _ in batch], [s for _, s in batch], use_tqdm=False)


class _Engine:
    """An in-process vLLM engine over the toy, and what can be asked of it."""

    def __init__(self, kind: str, toy: Toy, scratch: Path, clock: str) -> None:
        from verl.workers.rollout.vllm_rollout import utils
        from vllm import LLM

        from verl_tlt.config import TLTConfig
        from verl_tlt.server.engine_arguments import engine_kwargs

        utils.set_death_signal = lambda: None
        self.kind, self.toy, self.scratch = kind, toy, scratch
        self.now = time.process_time if clock == "cpu" else time.perf_counter
        if clock == "cpu":  # the policies see what the result is measured in
            from verl_tlt.engine_core import scheduler

            vars(scheduler)["time"] = SimpleNamespace(perf_counter=time.process_time, time=time.time)
        arguments: dict[str, Any] = dict(
            model=str(toy.policy), skip_tokenizer_init=True, dtype=find_dtype(), enforce_eager=True, seed=0,
            max_model_len=CONTEXT, max_num_seqs=BATCH, enable_prefix_caching=False, distributed_executor_backend="uni",
        )  # fmt: skip
        if kind == "tlt":
            settings = {"max_draft_length": LONGEST_DRAFT, "policy": "goodput"}
            tlt = TLTConfig.from_dict({"speculation": settings})
            arguments |= engine_kwargs(tlt, str(toy.drafter), SimpleNamespace(enforce_eager=True), {})
            arguments["worker_extension_cls"] = "verl_tlt.vllm_worker.extension.TLTWorkerExtension"
        self.llm = LLM(**arguments)
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._ours, self._lookup = type(self.scheduler), self.scheduler.dynamic_sd_lookup
        self.arms: dict[str, Any] = {}
        self._decisions: dict[str, RolloutDecision] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        """The policy's projections, once it has moved."""
        self.drain(seed=10**6, batch=2)

    # ------------------------------------------------------------------ decoding

    def drain(self, seed: int, batch: int = BATCH, share: float = 1.0) -> dict[str, Any]:
        """Decode one long-tailed batch to its end, responses of `share` of their lengths: seconds and tokens."""
        return self._generate([(prompt, max(1, round(n * share))) for prompt, n in problems(seed, batch)])

    def steady(self, batch: int, tokens: int, seed: int) -> dict[str, Any]:
        """Decode `batch` requests of equal length: seconds and tokens."""
        return self._generate([(prompt, tokens) for prompt, _ in problems(seed, batch)])

    def respond(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Decode one response to each prompt to its own end, or to `tokens`: seconds and tokens."""
        from demo.toy import task

        return self._generate([(prompt, tokens) for prompt in prompts], [task.TOKEN_ID[task.EOS]])

    def _generate(self, work: Sequence[tuple[list[int], int]], stop: Sequence[int] = ()) -> dict[str, Any]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        common = {"temperature": 1.0, "ignore_eos": True, "stop_token_ids": list(stop), "detokenize": False}
        params = [SamplingParams(max_tokens=n, **common) for _, n in work]
        start = self.now()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = self.now() - start
        return {"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}

    # ------------------------------------------------------------------ control (kind `tlt`)

    def set_drafting(self, enabled: bool) -> bool:
        """Switch the drafter's own pass."""
        return self.llm.collective_rpc("tlt_set_drafting", args=(enabled,))[0] is None

    def calibrate(self, budget_s: float = 40.0) -> list[dict[str, Any]]:
        """What a run measures at its start, as rows of a latency table."""
        from verl_tlt.server.calibration import calibrate

        engine: Any = _AsyncView(self)
        return asyncio.run(calibrate(engine, ARMS, BATCH, 60, budget_s)).to_list()

    def add_arm(self, name: str, table: list[dict[str, Any]], trace: bool = False) -> None:
        """An arm of the benchmark: `off`, `fixed-K`, `zero` or a policy, told what a run would tell it.

        `goodput/OF` is one that decodes with drafters of its own: what another learned of its own is no matter to it.
        """
        from verl_tlt.engine_core.steps import StepTrace
        from verl_tlt.speculation.step_control import StepControl

        known, kind = LatencyTable.from_list(table), name.partition("/")[0]
        if name == "table":
            policy: Any = VllmTable(known, self.toy.acceptance, ARMS, BATCH)
        else:
            policy = named(kind if kind in ("goodput", *RIVALS) else "off", ARMS)
        written = StepTrace(self.scratch / f"{name}.jsonl") if trace else None
        decision = self._decisions[name] = RolloutDecision(kind)
        decision.calibrated(known)
        control = self.arms[name] = StepControl(policy, Limits(ARMS), written)
        control.control(points=table, acceptance=self.toy.acceptance)
        control.drafting = name != "off"
        if name.startswith("fixed-"):
            control.force_k = int(name.removeprefix("fixed-"))

    def use(self, name: str) -> None:
        """Decode under this arm from here on; `vllm-kN`: under vLLM's own scheduler with K=N in its table."""
        from vllm.v1.core.sched.scheduler import Scheduler

        own = name.startswith(VLLM)
        self.scheduler.__class__ = Scheduler if own else self._ours
        self.scheduler.dynamic_sd_lookup = [int(name.removeprefix(VLLM))] * (BATCH + 1) if own else self._lookup
        self.scheduler.drafts_expected = True  # of every step: what vLLM does by itself
        if not own:
            self.scheduler.tlt = self.arms[name]
        self.set_drafting(own or self.arms[name].drafting)

    # ------------------------------------------------------------------ what a run changes

    def publish(self, drafter: str) -> None:
        """Serve another drafter, by its file."""
        loaded = self.llm.collective_rpc("tlt_load_drafter", args=(drafter,))[0]
        if not loaded["ok"]:
            raise ValueError(loaded["error"])

    def move_policy(self, noise: float) -> None:
        """The policy as it was loaded, its projections with so many standard deviations of noise: the same each time.

        Embedding, head and norms stay, which the drafter shares.
        """
        policy = self._policy()
        projections = {name: weight for name, weight in policy.named_parameters() if "_proj" in name}
        if not self._loaded:
            self._loaded = {name: weight.detach().clone() for name, weight in projections.items()}
        drawn = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in projections.items():
                as_loaded = self._loaded[name]
                spread = noise * as_loaded.float().std()
                weight.copy_(as_loaded + (spread * torch.randn(weight.shape, generator=drawn)).to(weight.dtype))

    def load_policy(self, directory: str) -> None:
        """Other weights for the policy: those in a directory of the same shapes."""
        from safetensors.torch import load_file

        self._policy().load_weights(load_file(Path(directory) / "model.safetensors").items())
        self._loaded = {}

    def _policy(self) -> Any:
        """vLLM's model, a module that also loads weights."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.get_model()

    def sync(self, name: str, acceptance: Sequence[float]) -> bool:
        """What a weight sync decides and tells an arm: whether the drafter runs, and how often it is accepted."""
        arm, decision = self.arms[name], self._decisions[name]
        if (stats := arm.stats(reset=True)).num_steps:
            decision.learn([stats], None)
        drafting = decision.drafts(acceptance)
        self.set_drafting(drafting)
        arm.control(drafting=drafting, acceptance=list(acceptance))
        return drafting

    def stats(self, name: str) -> dict[str, Any]:
        """An arm's sums since the last call."""
        self.arms[name].flush()
        return asdict(self.arms[name].stats(reset=True))
