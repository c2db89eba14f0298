"""Whole verl jobs of the toy on GPUs: what only Ray, CUDA IPC and several processes on one device can show.

    python -m benchmarks.gpu.job --out FILE --budget 560

* sync: three GRPO steps with the policy sent to the engines by CUDA IPC, replicas that sleep while it is trained, and
  in the third step spot training beside sleeping engines, which load its drafter. One GPU is enough; with two or more
  an engine is two GPUs wide, and of four GPUs two replicas are made, of which one may train while the other decodes.

Without a GPU: `--tiny`, where the CPU platform's shared memory and sleep stand in (`verl_cpu`).
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.faults.run import TLT
from benchmarks.gpu.engines import LITTLE
from benchmarks.gpu.parts import NEEDS_CUDA, Bench, Part, device_memory, main
from benchmarks.toy_job import FORCED, SAMPLES, Job, make_assets
from verl_tlt.commands.compare.job import read_rows
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.commands.report.reader import read_trace

BATCH, LONG, SHORT = 4, 200, 40
COLD_START = "tlt.spot.cold_start_s=6"
QUIET_S = 600.0
"""Without a line in the trace a job hangs."""
SHOWN = (
    "timing_s/step", "timing_s/update_weights", "training/rollout_probs_diff_max", "tlt/accept_length",
    "tlt/drafter_off_frac", "tlt/drafter_version", "tlt/reload_failures", "tlt/overhead_s",
)  # fmt: skip
"""verl's own metrics that the report holds, of every step."""


def sync(bench: Bench) -> dict[str, Any]:
    """Three steps with engines as wide as there are devices for, two at most. A single replica never leaves, so that it
    is the cold start, in the third step, which trains beside it.
    """
    devices = len(device_memory()) if bench.cuda else 2
    wide = min(2, devices)
    return job(bench, 3, min(2, devices // wide), wide, [COLD_START])


@interruptible()  # a time limit ends the job's processes, too
def job(bench: Bench, steps: int, replicas: int, wide: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a job of so many replicas, each so many devices wide, wrote of its steps; RuntimeError where it failed.

    What a job wrote that fails or hangs is noted.
    """
    assets = make_assets(bench.directory / "assets", lambda index: [SHORT if index % BATCH else LONG] * SAMPLES)
    shape = {"REPLICAS": str(replicas), "TP": str(wide), "EXECUTOR": "mp", "DEVICE": bench.device, "SAVE_FREQ": "-1"}
    run = Job(
        bench.directory / "job",
        assets,
        steps,
        [*_sizes(bench), *TLT, *overrides],
        **shape,
        DTYPE="bfloat16" if bench.cuda else "float32",
    )
    memory: list[list[float]] = []
    looked = 0.0

    def found() -> dict[str, Any]:
        by_device: Any = [[min(d), max(d)] for d in zip(*memory, strict=True)] if bench.cuda else NEEDS_CUDA
        return {"replicas": replicas, "tensor_parallel": wide, "memory_gib": by_device, **_written(run.out)}

    try:
        for _ in run.events(QUIET_S, poll_s=0.2):
            if bench.cuda and time.monotonic() > looked + 1.0:
                memory += filter(None, [device_memory()])  # one look may fail
                looked = time.monotonic()
        if status := run.tree.process.returncode:
            raise RuntimeError(f"the job ended with {status}: " + "\n".join(run.said().splitlines()[-40:]))
    finally:
        with suppress(Exception):  # it may have written nothing
            bench.note(**found())
        run.end()
    return found()


def _sizes(bench: Bench) -> Sequence[str]:
    rollout = "actor_rollout_ref.rollout"
    share = LITTLE.settings() if bench.cuda else {}  # another part's engine may be beside it
    return (
        FORCED, f"data.train_batch_size={BATCH}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        f"data.max_response_length={LONG + 40}", f"{rollout}.max_model_len={LONG + 120}",
        f"{rollout}.max_num_seqs={BATCH * SAMPLES}",
        *(f"++{rollout}.{key}={value}" for key, value in share.items()),
    )  # fmt: skip


def _written(out: Path) -> dict[str, Any]:
    """The steps' metrics, every reload and every session."""
    trace = read_trace(out / "trace")
    return {
        "steps": {step: _chosen(row, SHOWN) for step, row in read_rows(out / "metrics.jsonl").items()},
        "reloads": [_chosen(vars(r), ("step", "replica", "version", "ok", "error", "seconds")) for r in trace.reloads],
        "sessions": [_chosen(vars(s), ("step", "replica", "steps", "outcome", "error")) for s in trace.sessions],
    }


def _chosen(facts: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: facts[name] for name in names if name in facts}


PARTS = {"sync": Part(sync, 110, most_s=200)}

if __name__ == "__main__":
    main("benchmarks.gpu.job", PARTS, __doc__)
