"""What control costs: CPU time that verl-tlt adds to an engine step of 256 requests, without running a model.

vLLM's real scheduler under ours, with a made worker that accepts drafts at random and a made clock that advances as a
8B model on an H100 would, so that the policy sees believable latencies and chooses among several K. Counted is the CPU
time of this thread in our code only, less what the same measurement says of a scheduler that extends the same methods
and adds nothing. What a step waits for (`schedule`, `update_from_output`, `update_draft_token_ids`) is reported apart
from what runs while the model computes (`get_grammar_bitmask`: counting, statistics, the policy's learning).

All runs take the same steps, and each step counts with its median over the runs: what interrupts a machine now here,
now there is not what control costs. Single runs, interruptions included, are reported beside it, and what vLLM's own
scheduler takes for a step (`vllm_us_p50`), which tells a fast machine from a slow one.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

ARMS = (0, 1, 2, 3, 5, 7)
ACCEPTANCE = 0.6
PROMPT = 16
METHODS = ("schedule", "update_from_output", "update_draft_token_ids", "get_grammar_bitmask")
"""Of vLLM's scheduler, which ours extend."""


class Clock:
    """Seconds that pass when told to; stands in for `time` in the scheduler's module."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    time = perf_counter


class Ledger:
    """CPU time inside our methods, less vLLM's own inside them."""

    def __init__(self) -> None:
        self.ours = self.theirs = self.vllm = 0.0

    def timed(self, method: Callable[..., Any], ours: bool) -> Callable[..., Any]:
        """`method`, its thread time added to one side."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent = time.thread_time() - start
                if ours:
                    self.ours += spent
                else:
                    self.theirs += spent

        return run

    def take(self) -> float:
        """Seconds of ours since the last call."""
        spent = self.ours - self.theirs
        self.vllm += self.theirs
        self.ours = self.theirs = 0.0
        return spent

    def take_vllm(self) -> float:
        """Seconds of vLLM's since the last call, up to the last `take`."""
        spent, self.vllm = self.vllm, 0.0
        return spent


def bare(base: type, lengths: Sequence[int]) -> type:
    """vLLM's scheduler extended as ours is, by nothing: drafts `lengths`, a step after the other."""
    steps = iter(lengths)

    class Bare(base):  # type: ignore[misc]
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            return super().schedule(*args, **kwargs)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            return super().update_from_output(scheduler_output, model_runner_output)

        def update_draft_token_ids(self, draft_token_ids: Any) -> None:
            super().update_draft_token_ids(draft_token_ids)

        def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
            return super().get_grammar_bitmask(scheduler_output)

        def _tlt_choose(self, batch: int) -> int:
            return next(steps)

    return Bare


@contextmanager
def made_scheduler(
    batch: int, clock: Clock, ledger: Ledger, scratch: Path, lengths: Sequence[int] | None = None
) -> Iterator[Any]:
    """Our scheduler over vLLM's, with room for `batch` requests, on the made clock; with `lengths` a `bare` one."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from benchmarks.lossless.tiny_policy import build_drafter_dir
    from benchmarks.simulate.hardware import QWEN3_8B_H100, calibration_of
    from tests.toy.assets import build_assets
    from verl_tlt.config import TLTConfig
    from verl_tlt.engine_core import scheduler as module
    from verl_tlt.server.engine_arguments import engine_kwargs

    assets = build_assets(scratch, width="small", train_rows=1, val_rows=1)
    build_drafter_dir(scratch / "drafter", assets.policy, informed=False)
    tlt = TLTConfig.from_dict({"speculation": {"max_draft_length": ARMS[-1], "arms": list(ARMS)}})
    config = EngineArgs(
        model=str(assets.policy), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=2048,
        max_num_seqs=batch, max_num_batched_tokens=batch * PROMPT * 2, enable_prefix_caching=False,
        **engine_kwargs(tlt, str(scratch / "drafter"), SimpleNamespace(enforce_eager=True), {}),
    ).create_engine_config()  # fmt: skip
    blocks = batch * 2048 // 16
    config.cache_config.num_gpu_blocks, config.cache_config.block_size = blocks, 16
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float32)
    kept = {name: getattr(Scheduler, name) for name in METHODS}
    real_time = module.time
    for name, method in kept.items():
        setattr(Scheduler, name, ledger.timed(method, ours=False))
    module.time = clock  # type: ignore[assignment]
    os.environ["TLT_TRACE_DIR"] = str(scratch)
    kind = module.TLTScheduler if lengths is None else bare(Scheduler, lengths)
    made = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )
    if lengths is None:
        made.tlt.control(points=calibration_of(QWEN3_8B_H100, ARMS).to_list(), acceptance=[ACCEPTANCE] * ARMS[-1])
    for name in kept:
        setattr(made, name, ledger.timed(getattr(made, name), ours=True))
    # vLLM asks for K in the middle of its own `schedule`: that time is ours.
    choose = ledger.timed(made._tlt_choose, ours=True)
    made.dynamic_sd_lookup = module._DraftLengths(choose)
    try:
        yield made
    finally:
        made.shutdown()
        module.time = real_time
        for name, method in kept.items():
            setattr(Scheduler, name, method)


class Spent(NamedTuple):
    """Microseconds of one step."""

    waited: float  # our own, that the step waited for
    overlapped: float  # our own, while the model computes
    vllm: float  # of vLLM's scheduler


def step(
    scheduler: Any, clock: Clock, ledger: Ledger, rng: np.random.Generator, verified: int
) -> tuple[int, float, float]:
    """One engine step of a made worker: K drafted, our seconds that the step waited for, and those that overlap it."""
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    from benchmarks.simulate.hardware import QWEN3_8B_H100

    output = scheduler.schedule()
    waited = ledger.take()
    scheduler.get_grammar_bitmask(output)  # vLLM calls it while the model computes
    overlapped = ledger.take()
    ids = list(output.num_scheduled_tokens)
    drafted = output.num_spec_tokens_to_schedule
    hits = rng.random((len(ids), max(verified, 1))) < ACCEPTANCE
    accepted = np.logical_and.accumulate(hits, axis=1).sum(axis=1) if verified else np.zeros(len(ids), int)
    tokens = [[7] * (1 + n) for n in accepted.tolist()]
    if not output.scheduled_spec_decode_tokens:
        tokens = [[7]] * len(ids)
    seconds = QWEN3_8B_H100.seconds(len(ids), len(ids) * 500, verified, drafted)
    clock.now += seconds * float(rng.lognormal(0.0, 0.03))
    rows = {request: i for i, request in enumerate(ids)}
    scheduler.update_from_output(output, ModelRunnerOutput(req_ids=ids, req_id_to_index=rows, sampled_token_ids=tokens))
    live = [request for request in ids if request in scheduler.requests]
    if drafted:
        scheduler.update_draft_token_ids(DraftTokenIds(live, [[7] * drafted for _ in live]))
    return int(drafted), waited + ledger.take(), overlapped


def measure(batch: int = 256, steps: int = 1200, runs: int = 5) -> dict[str, Any]:
    """Microseconds of control per engine step at a batch that stays near `batch`, and the share of each K."""
    chosen, found, nothing = [], [], []
    for _ in range(runs):
        lengths, spent = _run(batch, steps)
        chosen.append(lengths)
        found.append(spent)
        nothing.append(_run(batch, steps, lengths)[1])  # in turn, so that both meet the same machine
    if any(other != lengths for other in chosen):
        raise SystemExit("Two runs of the same steps chose different draft lengths; they cannot be compared.")
    measuring = np.median(nothing, axis=1, keepdims=True) * (1.0, 1.0, 0.0)  # [runs, 1, 3], vLLM's own is no overhead
    spent = np.array(found) - measuring  # [runs, steps, 3]: the columns of `Spent`
    waited_us, overlapped_us, vllm_us = np.median(spent, axis=0).T  # [steps] each
    share = {str(k): round(lengths.count(k) / len(lengths), 3) for k in sorted(set(lengths))}
    return {
        "batch": batch,
        "steps": spent.shape[1],
        "runs": runs,
        "overhead_us_p50": _percentile(waited_us, 50),
        "overhead_us_p99": _percentile(waited_us, 99),
        "overlapped_us_p50": _percentile(overlapped_us, 50),
        "overlapped_us_p99": _percentile(overlapped_us, 99),
        "vllm_us_p50": _percentile(vllm_us, 50),
        "single_run_us_p99": [_percentile(run, 99) for run in spent[:, :, 0]],
        "measuring_us_p50": [round(float(x), 1) for x in measuring[:, 0, 0]],
        "draft_length_share": share,
    }


def _percentile(values: np.ndarray, percent: float) -> float:
    return round(float(np.percentile(values, percent)), 1)


def _run(batch: int, steps: int, k: Sequence[int] | None = None) -> tuple[list[int], list[Spent]]:
    """K of each step, and what was spent in each from the hundredth on."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    clock, ledger, rng = Clock(), Ledger(), np.random.default_rng(0)
    spent, lengths = [], []
    with tempfile.TemporaryDirectory() as scratch, made_scheduler(batch, clock, ledger, Path(scratch), k) as scheduler:
        verified, number = 0, 0
        for n in range(steps):
            while len(scheduler.requests) < batch:  # those that end are replaced: prefills join all the time
                params = SamplingParams(max_tokens=int(rng.integers(400, 1800)), ignore_eos=True)
                scheduler.add_request(Request(f"r{number}", [5] * PROMPT, params, None))
                number += 1
            verified, waited, overlapped = step(scheduler, clock, ledger, rng, verified)
            lengths.append(verified)
            if n == 100:
                gc.collect()
                gc.freeze()
            vllm = ledger.take_vllm()
            if n > 100:
                spent.append(Spent(1e6 * waited, 1e6 * overlapped, 1e6 * vllm))
    gc.unfreeze()
    return lengths, spent
