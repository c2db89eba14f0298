"""One engine as a recipe would start it, without Ray and the trainer: for `verl-tlt calibrate` and `doctor --gpu`.

What a step costs and whether a drafter survives sleep are facts about this machine, this policy and this vLLM, so they
can be found out before a run. The engine takes the same settings from the recipe as verl's server would hand it. It
runs in a child process (`doctor.engine_process`), which answers with its findings.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl_tlt import child_engine
from verl_tlt.config import TLTConfig, TLTConfigError, dtype_name
from verl_tlt.server.calibration import COSTS_DIR, calibrate
from verl_tlt.speculation.costs.latency_table import for_policy, parse
from verl_tlt.speculation.costs.tables import LatencyTable, TableKey, save_table, stock_points
from verl_tlt.speculation.types import OFF

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class EngineJob:
    """What the child process is asked."""

    overrides: list[str]
    """Of the recipe, as given to `verl.trainer.main_ppo`."""
    config_name: str
    cpu: bool
    budget_s: float = 60.0
    """Seconds of measuring, engine starts apart."""
    costs_only: bool = False
    """Step costs alone, and nothing about sleep and memory."""


@dataclass(frozen=True)
class Setup:
    """A recipe, as far as its engine is concerned."""

    policy: str
    """Local directory, or name on the hub."""
    tlt: TLTConfig
    rollout: Any
    """verl's `actor_rollout_ref.rollout` node."""
    context: int
    """Longest sequence, in tokens."""


def run_job(job: EngineJob, directory: Path, timeout_s: float = 1800.0) -> dict[str, Any]:
    """Have a child process do `job`, and return what it found out; `directory` is for its drafter and its log.

    Raises:
        ChildEngineError: it could not; one sentence, or the end of the engine's log.
    """
    if job.cpu:
        child_engine.require_cpu_platform()
    return child_engine.run_job("verl_tlt.doctor.engine_process", asdict(job), directory, {}, timeout_s)


def read_setup(job: EngineJob) -> Setup:
    """The parts of a recipe that its engine is made of.

    Raises:
        TLTConfigError: the recipe cannot be composed, or its policy is not on this machine.
    """
    from verl_tlt.doctor import facts
    from verl_tlt.doctor.models import located, look_at_policy
    from verl_tlt.doctor.recipe import compose

    config = compose(job.overrides, job.config_name)
    rollout, path = config.actor_rollout_ref.rollout, str(config.actor_rollout_ref.model.path)
    look = look_at_policy(path)
    if look.family is None or look.problem:
        raise TLTConfigError(look.problem or look.unseen or path)
    context = int(rollout.max_model_len or rollout.prompt_length + rollout.response_length)
    return Setup(located(path), facts.read_settings(config), rollout, context)


def keep_costs(answer: dict[str, Any], out: Path | None) -> tuple[Path, LatencyTable]:
    """Store what a job measured, under its key; returns the file and the table.

    Raises:
        TLTConfigError: nothing was measured, or the directory cannot be written.
    """
    costs = parse(answer["costs"] or {})
    if OFF not in costs or not any(arm > 0 for arm in costs):
        raise TLTConfigError("Steps with and without a drafter are needed, and not all were measured; raise --seconds.")
    stock, off = answer["stock"] or {}, answer["off"] or {}
    measured = stock_points([(batch, stock[batch], off[batch]) for batch in stock.keys() & off.keys()])
    table = replace(for_policy(costs), stock=measured)
    try:
        return save_table(out or COSTS_DIR, TableKey(**answer["key"]), table), table
    except OSError as error:
        raise TLTConfigError(f"The cost table cannot be kept: {error}") from error


# ---------------------------------------------------------------------- inside the child


class StandaloneEngine:
    """A running engine; `channel` is None for one without a drafter."""

    def __init__(self, llm: Any, channel: Any, drafter: Path | None, setup: Setup) -> None:
        self.llm, self.channel, self.drafter, self.setup = llm, channel, drafter, setup
        self.vocab_size = int(llm.model_config.get_vocab_size())

    async def generate(self, prompt: Sequence[int], tokens: int) -> None:
        """Decode `prompt` to exactly so many new tokens."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        async for _ in self.llm.generate({"prompt_token_ids": list(prompt)}, params, request_id=uuid4().hex):
            pass

    async def rpc(self, method: str, *args: Any) -> Any:
        """Call every worker; the first one's answer."""
        return (await self.llm.collective_rpc(method, args=args))[0]

    async def step_seconds(self, batch: int, tokens: int = 24) -> float:
        """Seconds from one token of each of `batch` requests to the next, on the wall clock.

        The difference between a long and a short decode: prompts and hand-overs cancel.
        """
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


@asynccontextmanager
async def start(setup: Setup, directory: Path, drafting: bool = True) -> AsyncIterator[StandaloneEngine]:
    """An engine as the recipe would have it; without `drafting` as stock verl would start it."""
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_tlt.channel import ChannelClient
    from verl_tlt.server import engine_arguments

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
    drafter = channel = None
    if drafting:
        drafter = write_drafter(setup, directory / "drafter")
        arguments |= engine_arguments.engine_kwargs(setup.tlt, str(drafter), rollout, user)
        arguments["worker_extension_cls"] = "verl_tlt.vllm_worker.extension.TLTWorkerExtension"
        # A Unix socket's path is short, whatever the directory's is.
        address = f"ipc://{tempfile.mkdtemp(prefix='tlt-')}/c"
        os.environ.update(TLT_CHANNEL=address, TLT_REPLICA="0", **engine_arguments.engine_environment())
        channel = ChannelClient(address)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        yield StandaloneEngine(llm, channel, drafter, setup)
    finally:
        llm.shutdown()
        if channel is not None:
            channel.close()


def write_drafter(setup: Setup, directory: Path) -> Path:
    """The recipe's drafter, or a random head of its shape: for costs it does not matter what a drafter knows."""
    from verl_tlt.drafter.staging import stage
    from verl_tlt.trainer.bootstrap import first_drafter

    longest = setup.context + setup.tlt.speculation.longest
    served = first_drafter(setup.tlt, setup.policy, dtype_name(setup.rollout.dtype), longest, None).served
    stage(served.config, served.weights, directory)
    return directory


async def measure_costs(engine: StandaloneEngine, budget_s: float) -> dict[int, list[tuple[int, float]]]:
    """Seconds per engine step by draft length (OFF included) and batch, as the trainer measures them at start."""
    from verl_tlt.server.engine_arguments import engine_arms

    rollout = engine.setup.rollout
    arms = engine_arms(engine.setup.tlt, bool(rollout.enforce_eager))
    return await calibrate(
        engine.llm, engine.channel, arms, int(rollout.max_num_seqs), engine.vocab_size, budget_s=budget_s
    )


def graph_memory_gib(log: str) -> list[float]:
    """What vLLM says in its log that captured CUDA graphs take, one figure for each engine started."""
    return [float(x) for x in re.findall(r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB", log)]
