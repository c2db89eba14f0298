"""Engines for `benchmarks.gpu.engine`, started as a recipe would have them, and what is done to them."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from benchmarks.gpu.parts import Bench
from benchmarks.gpu.shapes import draft_vocab_of, shape_of
from benchmarks.lossless.child import ANY_LENGTH
from benchmarks.lossless.tiny_policy import SMALL, build_drafter_dir, build_target
from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.doctor.engine_check import load_drafter
from verl_tlt.commands.doctor.standalone_engine import Setup, StandaloneEngine, set_up, start
from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.server.engine_arguments import most_requests
from verl_tlt.server.engine_calls import ask_scheduler
from verl_tlt.speculation.types import OFF

K_MAX = 7
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""The latter lets functions of this file be sent to vLLM's workers (`in_worker`)."""


CAPTURED = [*range(8, 257, 8), *range(288, 513, 32), *range(576, 1025, 64), *range(1152, 2049, 128)]
"""Tokens of a step: all batches to 32 requests at K=7, and above them at most an eighth of padding."""


@dataclass(frozen=True)
class Share:
    """What an engine takes of a device. vLLM measures free memory at its start and refuses where another process gives
    memory back meanwhile, so engines side by side are told the size of their KV cache.
    """

    utilization: float
    kv_gib: float | None = None

    def settings(self) -> dict[str, Any]:
        """Those of `actor_rollout_ref.rollout`."""
        cache = {} if self.kv_gib is None else {"engine_kwargs.vllm.kv_cache_memory_bytes": int(self.kv_gib * 2**30)}
        return {"gpu_memory_utilization": self.utilization, **cache}


LITTLE, MOST = Share(0.2, 4.0), Share(0.7)


def tiny_engine(bench: Bench) -> AbstractAsyncContextManager[StandaloneEngine]:
    """A tiny policy with a drafter that knows it: what it samples and accepts can be judged.

    It drafts another length in every step, unless one is held. The drafter's longest context is not the policy's, so it
    has a table of rotary positions of its own. It leaves most of the device to others.
    """
    policy, drafter = _tiny(bench)
    setup = _setup(bench, policy, ANY_LENGTH, drafter, context=256, batch=64, share=LITTLE, more={})
    return start(setup, bench.directory)


def _tiny(bench: Bench) -> tuple[Path, Path]:
    """Directories of policy and drafter, made unless they are there."""
    policy, drafter = (bench.directory.parent / name for name in ("tiny-policy", "tiny-drafter"))
    if not drafter.exists():
        build_target(policy, vocab=SMALL)
        build_drafter_dir(drafter, policy, informed=True, max_position_embeddings=512)
    return policy, drafter


def shaped_engine(bench: Bench) -> AbstractAsyncContextManager[StandaloneEngine]:
    """A 7B policy's shape with made-up weights and a random drafter: what it costs is real, what it writes is noise."""
    policy = shape_of(bench, "7b").write(bench.directory.parent / "policy-7b")
    context, batch = (256, 4) if bench.tiny else (4096, 256)
    more: dict[str, Any] = {"load_format": "dummy"}
    if bench.cuda:  # vLLM's own largest graph, of 512 tokens, would make K=7 a K=1 above 128 requests
        more["compilation_config"] = {"cudagraph_capture_sizes": CAPTURED}
    setup = _setup(bench, policy, "live_table", None, context, batch, share=MOST, more=more)
    return start(setup, bench.directory)


def _setup(
    bench: Bench,
    policy: Path,
    chooses: str,
    drafter: Path | None,
    context: int,
    batch: int,
    share: Share,
    more: Mapping[str, Any],
) -> Setup:
    """`chooses`: the policy of draft lengths; `more`: further arguments of vLLM's."""
    rollout = {
        "dtype": "float32" if bench.tiny else "bfloat16", "max_num_seqs": batch, "enforce_eager": bench.tiny,
        "max_num_batched_tokens": 8192, "tensor_model_parallel_size": 1,
        "max_model_len": context, "name": "vllm", "seed": 0, "enable_prefix_caching": False,
        **{f"engine_kwargs.vllm.{key}": value for key, value in more.items()},
        **({"gpu_memory_utilization": 0.2} if bench.tiny else share.settings()),
    }  # fmt: skip
    speculation = {"max_draft_length": K_MAX, "policy": chooses}
    changes: dict[str, Any] = {f"actor_rollout_ref.rollout.{key}": value for key, value in rollout.items()}
    changes |= {"actor_rollout_ref.model.path": str(policy), "tlt": {"speculation": speculation}}
    changes["tlt"]["drafter"] = {"vocab": draft_vocab_of(bench)} if drafter is None else {"path": str(drafter)}
    if not (policy / "tokenizer.json").exists():
        changes |= {"actor_rollout_ref.model.load_tokenizer": False}
        changes |= {"actor_rollout_ref.rollout.engine_kwargs.vllm.skip_tokenizer_init": True}
    return set_up(Recipe(()), changes)


# ---------------------------------------------------------------------- what is done to them


async def hold(engine: StandaloneEngine, arm: int | None) -> None:
    """Draft so many tokens in every step from here on; `OFF`: without the drafter's pass; None: the policy chooses."""
    await engine.every("tlt_set_drafting", arm != OFF)
    await engine.llm.reset_prefix_cache()
    await ask_scheduler(engine.llm, "control", drafting=arm != OFF, force_k=None if arm is None else max(arm, 0))


async def stats(engine: StandaloneEngine) -> EngineStats:
    """Of what the engine did since the last call; RuntimeError where drafting failed: then it costs nothing."""
    found = from_plain(EngineStats, await ask_scheduler(engine.llm, "stats", reset=True))
    if failure := found.failure or await in_worker(engine, pass_failure):
        raise RuntimeError(f"the engine drafts nothing any more: {failure}")
    return found


def pass_failure(worker: Any) -> str:
    """Why the drafter's pass is not run any more; empty: it is."""
    return worker.tlt_pass.failure if worker.tlt_pass else ""


async def slept(bench: Bench, engine: StandaloneEngine) -> dict[str, Any]:
    """Put an engine to sleep at level 2 and wake it up, in verl's order.

    Returns:
        seconds of each stage, and GiB in use after it; whether sleep lost weights or buffers of the drafter, and
        whether they are back to the bit.
    """
    found: dict[str, Any] = {"seconds": {}, "memory_gib": {"awake": bench.memory()}}

    async def stage(name: str, work: Awaitable[Any]) -> Any:
        start = time.monotonic()
        answer = await work
        found["seconds"][name] = round(time.monotonic() - start, 3)
        found["memory_gib"][name] = bench.memory()
        return answer

    before = await in_worker(engine, live_digest)
    await stage("sleep", engine.llm.sleep(level=2))
    await stage("wake weights", engine.llm.wake_up(tags=["weights"]))
    if engine.llm.vllm_config.load_config.load_format != "dummy":
        await engine.llm.collective_rpc("reload_weights")  # verl would send the policy's
    found["lost"] = await in_worker(engine, live_digest) != before
    if error := await stage("load drafter", load_drafter(engine)):
        raise RuntimeError(f"the engine did not load its drafter again: {error}")
    await stage("wake KV cache", engine.llm.wake_up(tags=["kv_cache"]))
    found["reload_is_exact"] = await in_worker(engine, live_digest) == before
    return found


async def sample(engine: StandaloneEngine, after: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """So many tokens after each prompt, sampled at temperature 1.

    Prompts come in waves of as many as the engine decodes at once, and all of a wave begin in the same step: later
    steps then verify drafts of one length for every request, as vLLM's FULL CUDA graphs need it.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    async def one(prompt: list[int]) -> list[int]:
        found: list[int] = []
        asked: dict[str, Any] = {"prompt_token_ids": prompt}
        async for output in engine.llm.generate(asked, params, request_id=uuid4().hex):
            found = list(output.outputs[0].token_ids)
        return found

    sampled: list[list[int]] = []
    width, llm = most_requests(engine.llm), engine.llm
    for begin in range(0, len(after), width):
        wave = after[begin : begin + width]
        await llm.pause_generation(mode="keep", clear_cache=False)
        answers = asyncio.gather(*(one(prompt) for prompt in wave))
        while llm.output_processor.get_num_unfinished_requests() < len(wave) and not answers.done():
            await asyncio.sleep(0.001)
        await llm.resume_generation()
        sampled += await answers
    return sampled


def prompts(count: int) -> list[list[int]]:
    """Of the tiny policy's tokens, the same in every call."""
    rng = random.Random(0)
    return [[rng.randrange(3, SMALL) for _ in range(8)] for _ in range(count)]


async def accepted(engine: StandaloneEngine) -> list[float]:
    """Share of the drafts whose first 1, 2, ... tokens are accepted."""
    await stats(engine)
    await sample(engine, prompts(32), 64)
    found = await stats(engine)
    return [round(n / max(1, found.num_drafts), 4) for n in found.num_accepted_tokens_per_pos]


async def in_worker(engine: StandaloneEngine, function: Callable[..., Any], *args: Any) -> Any:
    """`function(worker, *args)` in the first worker's process."""
    return (await engine.llm.collective_rpc(function, args=args))[0]


def live_weights(worker: Any) -> dict[str, torch.Tensor]:
    """The live drafter's own weights and buffers, but not what is the policy's."""
    from verl_tlt.vllm_worker.extension import own_buffers

    drafter, target = worker.model_runner.drafter.model, worker.model_runner.get_model()
    theirs = {p.data_ptr() for p in target.parameters()}
    own = {n: p for n, p in drafter.named_parameters() if p.data_ptr() not in theirs and p.is_floating_point()}
    return own | own_buffers(drafter, target)


def live_digest(worker: Any) -> str:
    """A digest over the bits of `live_weights`, without the head of a pruned draft vocabulary.

    A load cuts that head from the policy's, which sleep has overwritten if its weights are made up.
    """
    digest = hashlib.sha256()
    config = worker.model_runner.drafter.model.config
    cut = config.draft_vocab_size < config.vocab_size
    for _, tensor in sorted((n, t) for n, t in live_weights(worker).items() if not (cut and "lm_head" in n)):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def overwrite(worker: Any, value: float, only: str) -> list[str]:
    """Fill those of the live drafter's own weights and buffers whose names hold `only`; their names."""
    chosen = {name: tensor for name, tensor in live_weights(worker).items() if only in name}
    with torch.no_grad():
        for tensor in chosen.values():
            tensor.fill_(value)
    return list(chosen)
