"""One vLLM engine as a recipe's run would start it, without Ray and the trainer: what every command measures with."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tlt.checks.models import POLICY, located
from verl_tlt.checks.recipe import Recipe, context_tokens, device_of, engine_dtype, read_settings, select
from verl_tlt.checks.rules import trains_beside_engines
from verl_tlt.config import TLTConfig, TLTConfigError, dtype_name
from verl_tlt.drafter.model_files import NotHereError, elsewhere, first_line, hub_errors, is_name
from verl_tlt.drafter.policy import read_model_config
from verl_tlt.drafter.tensor_file import tensor_files
from verl_tlt.server import calibration, engine_arguments
from verl_tlt.server.engine_calls import answered, fail_calls_when_dead
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.graph_rules import is_hybrid
from verl_tlt.upstream.versions import location

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from vllm.v1.engine.async_llm import AsyncLLM

PROMPT_TOKENS = 16
_ENGINE_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
"""Files of a model on the hub that an engine is made from."""
_COPIES_OF_WEIGHTS = ("original/*", "consolidated*", "onnx/*")


@dataclass(frozen=True)
class Setup:
    """The parts of a recipe that its engine is made of."""

    tlt: TLTConfig
    rollout: DictConfig
    """verl's `actor_rollout_ref.rollout` node; its `max_model_len` is the longest sequence, in tokens."""
    model: DictConfig
    """verl's `actor_rollout_ref.model` node; its `path` is a local directory, or a name on the hub."""
    device: str
    """The kind of device that the recipe computes on (`trainer.device`), such as `cuda` or `cpu`."""
    beside_spot_trainer: bool
    """Whether a spot trainer keeps a context on the engine's device."""


def set_up(recipe: Recipe, changes: dict[str, Any] | None = None) -> Setup:
    """The parts of a recipe's engine, with other values at the dotted keys of `changes`."""
    with recipe.composed(changes) as config:
        if elsewhere(path := str(select(config, POLICY, ""))):
            raise TLTConfigError(f"{POLICY}={path} is on another file system: copy it here, and give its folder.")
        rollout = config.actor_rollout_ref.rollout
        model = config.actor_rollout_ref.model
        model.path = located(path)
        rollout.max_model_len = context_tokens(config)
        rollout.dtype = engine_dtype(config)
        if rollout.load_format == "dummy":  # no trainer sends it weights
            rollout.load_format = "auto"
        settings = read_settings(config)
        return Setup(settings, rollout, model, device_of(config), trains_beside_engines(config, settings))


def run_environment(recipe: Recipe) -> dict[str, str]:
    """Variables that a recipe's engines have beside this process's: those that Ray hands on.

    A clone of verl in the recipe's directory is on `PYTHONPATH`: `python -m` finds it there, and a child engine, which
    does not look into its working directory, would not.
    """
    with recipe.composed() as config:
        handed = select(config, "ray_kwargs.ray_init.runtime_env.env_vars", {})
    own: dict[str, str] = {}
    if isinstance(handed, dict):
        own = {str(name): str(value) for name, value in handed.items()}
    clone = Path(recipe.directory or ".").resolve()
    verl = location("verl")
    if verl is not None and verl.resolve().parent == clone:
        others = own.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        own["PYTHONPATH"] = f"{clone}{os.pathsep}{others}" if others else str(clone)
    return own


def fetch_policy(policy: str | os.PathLike[str]) -> None:
    """Download the files of a hub policy that an engine reads and the cache lacks; a `NotHereError` says why not.

    Without a hub the cached folder is taken if it has all weights: other files may be missing in it.
    """
    from huggingface_hub import snapshot_download

    if not is_name(policy):
        return
    name = os.fspath(policy)
    try:
        folder = Path(
            snapshot_download(name, allow_patterns=list(_ENGINE_FILES), ignore_patterns=list(_COPIES_OF_WEIGHTS))
        )
    except hub_errors() as error:
        if not (here := getattr(error, "snapshot_path", None)):  # of huggingface_hub's IncompleteSnapshotError
            raise NotHereError(f"{name} is no folder here and could not be fetched: {first_line(error)}.") from error
        folder = Path(here)
    _, owners = tensor_files(folder, fetch=False)
    missing = sorted(file for file in set(owners.values()) if not (folder / file).is_file())
    if missing:
        raise NotHereError(f"{name}: {missing[0]} is not in the local cache, and could not be fetched.")


class StandaloneEngine:
    """A running engine; the scheduler of one without a drafter is vLLM's, which answers no calls."""

    def __init__(self, llm: AsyncLLM, drafter: Path | None, setup: Setup) -> None:
        self.llm, self.drafter, self.setup = llm, drafter, setup
        self.vocab_size = int(llm.model_config.get_vocab_size())

    async def generate(self, prompt: Sequence[int], tokens: int) -> None:
        """Decode `prompt` to exactly so many new tokens."""
        await calibration.decode(self.llm, prompt, temperature=1.0, max_tokens=tokens, ignore_eos=True)

    async def every(self, method: str, *args: object) -> list[Any]:
        """Call every worker; all answers, in the order of ranks."""
        return list(await answered(self.llm, f"answer {method}", self.llm.collective_rpc(method, args=args)))

    async def step_seconds(self, batch: int, tokens: int = 64) -> float:
        """Wall-clock seconds of a step of `batch` requests: a long decode less a short one, by token."""
        prompts = [[(7 * i + 13 * j) % (self.vocab_size - 1) + 1 for j in range(PROMPT_TOKENS)] for i in range(batch)]

        async def timed(new: int) -> float:
            await self.llm.reset_prefix_cache()
            start = time.perf_counter()
            await asyncio.gather(*(self.generate(prompt, new) for prompt in prompts))
            return time.perf_counter() - start

        short, long = await timed(2), await timed(2 + tokens)
        return max(long - short, 1e-9) / tokens

    async def wall_seconds(self, batches: Sequence[int]) -> dict[int, float]:
        """`step_seconds` by batch, up to the engine's largest.

        It is the lower of two readings, because other load on the machine only adds time.
        """
        batches = [batch for batch in batches if batch <= engine_arguments.most_requests(self.llm)]
        turns = [{batch: await self.step_seconds(batch) for batch in batches} for _ in range(2)]
        return {batch: min(turn[batch] for turn in turns) for batch in batches}

    async def measure_costs(self, budget_s: float) -> LatencyTable:
        """Seconds per engine step by draft length (OFF included) and batch, as the trainer measures them at start."""
        lengths = engine_arguments.started_lengths(self.llm)
        loads = calibration.loads_of(self.llm, lengths[-1])
        sampling = calibration.sampling_of(self.setup.rollout)
        return await calibration.calibrate(self.llm, lengths, loads, self.vocab_size, budget_s, budget_s, sampling)


@asynccontextmanager
async def start(
    setup: Setup, directory: Path, drafting: bool = True, extra: Mapping[str, Any] | None = None
) -> AsyncIterator[StandaloneEngine]:
    """Start an engine as the recipe's run would; without `drafting` as stock verl would.

    Commands start engines nowhere else. `extra` are further arguments of vLLM's: a drafter among them has a run's
    workers, and vLLM's own scheduler.
    """
    from verl_tlt.server.launch import Launch

    drafter = directory / "drafter" if drafting else None
    if drafter is not None:  # the recipe's, or a random head of its shape: costs do not depend on weights
        from verl_tlt.drafter.checkpoint import stage
        from verl_tlt.trainer.run_setup import first_drafter

        longest = setup.rollout.max_model_len + setup.tlt.speculation.max_draft_length
        served = first_drafter(setup.tlt, setup.model.path, dtype_name(setup.rollout.dtype), longest, None).served
        stage(served.config, served.weights, drafter)

    speculates = drafting or "speculative_config" in (extra or {})
    hybrid = speculates and is_hybrid(read_model_config(setup.model.path))

    def arguments(user: Mapping[str, Any]) -> dict[str, Any]:
        ours = engine_arguments.for_hybrids() if hybrid else {}
        if drafter is not None:
            ours = engine_arguments.engine_kwargs(setup.tlt, str(drafter), setup.rollout, user, hybrid=hybrid)
        return {**ours, **(extra or {})}

    before = dict(os.environ)
    if speculates:
        os.environ.update(TLT_REPLICA="0", **engine_arguments.engine_environment())
    extension = engine_arguments.WORKER_EXTENSION if speculates else None
    llm = await Launch(setup.rollout, setup.model, arguments, extension).launched()
    watch = asyncio.create_task(fail_calls_when_dead(llm))
    try:
        yield StandaloneEngine(llm, drafter, setup)
    finally:
        llm.shutdown()
        await watch
        os.environ.clear()  # the engine that is started next must not inherit them
        os.environ.update(before)
