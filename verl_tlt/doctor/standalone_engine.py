"""One vLLM engine as a recipe would start it, without Ray and the trainer: what the doctor and `calibrate` measure."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from verl_tlt.config import TLTConfig, TLTConfigError, dtype_name
from verl_tlt.doctor.models import check_policy, located
from verl_tlt.doctor.recipe import Recipe, compose, context_tokens, read_settings
from verl_tlt.drafter.policy import active_share, read_model_config
from verl_tlt.server import calibration, engine_arguments
from verl_tlt.server.engine_calls import answered, fail_calls_when_dead
from verl_tlt.server.scheduler_client import SchedulerClient
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.graph_rules import is_hybrid

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from vllm.v1.engine.async_llm import AsyncLLM

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Setup:
    """The parts of a recipe that its engine is made of."""

    policy: str
    """Local directory, or name on the hub."""
    tlt: TLTConfig
    rollout: DictConfig
    """verl's `actor_rollout_ref.rollout` node."""
    context: int
    """Longest sequence, in tokens."""


def read_setup(recipe: Recipe) -> Setup:
    """What a recipe's engine is made of; raises `TLTConfigError` where its policy is not on this machine."""
    config = compose(recipe.overrides, recipe.config)
    path = str(config.actor_rollout_ref.model.path)
    tlt = read_settings(config)
    model = check_policy(path, tlt.drafter.method)
    if model.level != "ok":
        raise TLTConfigError(model.sentence)
    return Setup(located(path), tlt, config.actor_rollout_ref.rollout, context_tokens(config))


class StandaloneEngine:
    """A running engine; the scheduler of one without a drafter is vLLM's, which answers no calls."""

    def __init__(self, llm: AsyncLLM, drafter: Path | None, setup: Setup) -> None:
        self.llm, self.drafter, self.setup = llm, drafter, setup
        self.scheduler = SchedulerClient(llm)
        self.vocab_size = int(llm.model_config.get_vocab_size())

    async def generate(self, prompt: Sequence[int], tokens: int) -> None:
        """Decode `prompt` to exactly so many new tokens."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        async for _ in self.llm.generate({"prompt_token_ids": list(prompt)}, params, request_id=uuid4().hex):
            pass

    async def rpc(self, method: str, *args: object) -> Any:
        """Call every worker; the first one's answer."""
        return (await self.every(method, *args))[0]

    async def every(self, method: str, *args: object) -> list[Any]:
        """Call every worker; all answers, in the order of ranks."""
        return list(await answered(self.llm, f"answer {method}", self.llm.collective_rpc(method, args=args)))

    async def fingerprint(self) -> str:
        """Of the drafter that is live: each rank's, where it has one."""
        return " ".join(filter(None, await self.every("tlt_fingerprint")))

    async def step_seconds(self, batch: int, tokens: int = 24) -> float:
        """Seconds on the wall clock from a token of `batch` requests to the next: of a long decode less a short one."""
        prompts = [[(7 * i + 13 * j) % (self.vocab_size - 1) + 1 for j in range(PROMPT_TOKENS)] for i in range(batch)]

        async def timed(new: int) -> float:
            await self.llm.reset_prefix_cache()
            start = time.perf_counter()
            await asyncio.gather(*(self.generate(prompt, new) for prompt in prompts))
            return time.perf_counter() - start

        short, long = await timed(2), await timed(2 + tokens)
        return max(long - short, 1e-9) / tokens

    async def wall_seconds(self, batches: Sequence[int]) -> dict[int, float]:
        """`step_seconds` by batch, the lower of two: a busy machine only ever adds."""
        turns = [{batch: await self.step_seconds(batch) for batch in batches} for _ in range(2)]
        return {batch: min(turn[batch] for turn in turns) for batch in batches}

    async def measure_costs(self, budget_s: float) -> LatencyTable:
        """Seconds per engine step by draft length (OFF included) and batch, as the trainer measures them at start."""
        arms, most = engine_arguments.started_arms(self.llm), int(self.setup.rollout.max_num_seqs)
        return await calibration.calibrate(self.llm, arms, most, self.vocab_size, budget_s=budget_s)


@asynccontextmanager
async def start(setup: Setup, directory: Path, drafting: bool = True) -> AsyncIterator[StandaloneEngine]:
    """An engine as the recipe would have it; without `drafting` as stock verl would start it."""
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    rollout = setup.rollout
    sleeps = bool(rollout.get("enable_sleep_mode", True)) and current_platform.is_sleep_mode_available()
    user = {k: v for k, v in dict((rollout.engine_kwargs or {}).get("vllm") or {}).items() if v is not None}
    arguments: dict[str, Any] = {
        "model": setup.policy, "dtype": rollout.dtype, "max_model_len": setup.context,
        "skip_tokenizer_init": True, "max_num_seqs": rollout.max_num_seqs, "enforce_eager": rollout.enforce_eager,
        "max_num_batched_tokens": max(int(rollout.max_num_batched_tokens), setup.context),
        "gpu_memory_utilization": rollout.gpu_memory_utilization, "tensor_parallel_size":
        rollout.tensor_model_parallel_size, "enable_sleep_mode": sleeps, "distributed_executor_backend": "mp", **user,
    }  # fmt: skip
    drafter = None
    if drafting:
        drafter = write_drafter(setup, directory / "drafter")
        policy = read_model_config(setup.policy)
        about = {"hybrid": is_hybrid(policy), "active_share": active_share(policy)}
        arguments |= engine_arguments.engine_kwargs(setup.tlt, str(drafter), rollout, user, **about)
        arguments["worker_extension_cls"] = "verl_tlt.vllm_worker.extension.TLTWorkerExtension"
        source, method = setup.tlt.speculation.source, setup.tlt.drafter.method
        os.environ.update(TLT_REPLICA="0", **engine_arguments.engine_environment(source, method))
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    watch = asyncio.create_task(fail_calls_when_dead(llm))
    try:
        yield StandaloneEngine(llm, drafter, setup)
    finally:
        llm.shutdown()
        await watch


def write_drafter(setup: Setup, directory: Path) -> Path:
    """The recipe's drafter, or a random head of its shape: for costs it does not matter what a drafter knows."""
    from verl_tlt.drafter.staging import stage
    from verl_tlt.trainer.run_setup import first_drafter

    longest = setup.context + setup.tlt.speculation.longest
    served = first_drafter(setup.tlt, setup.policy, dtype_name(setup.rollout.dtype), longest, None).served
    stage(served.config, served.weights, directory)
    return directory


def graph_memory_gib(log: str) -> list[float]:
    """What vLLM says in its log that captured CUDA graphs take, one figure for each engine started."""
    return [float(x) for x in re.findall(r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB", log)]
