"""Hundreds of RL steps: how quickly does a session stop, what does TLT take of a step, and does anything grow.

    python -m benchmarks.endurance --steps 215 --out benchmarks/results/endurance.json
    python -m benchmarks.endurance --steps 215 --leaks --out benchmarks/results/endurance_leaks.json
    python -m benchmarks.endurance --steps 215 --leaks --stock

The toy's GRPO job with two replicas and a bubble in nearly every step. Sessions do not run out of epochs here, so that
nearly each is stopped while it trains. Its micro-batches differ in cost as the lengths of what they pack do. A stop may
take as long as the session's longest micro-batch and a tenth of a second.

With `--leaks` every process of the job is judged by what it was seen to hold after each step (`process_sizes`). Nothing
may grow: the Theil-Sen slope over the last steps is below `TOLERANCE`; in the first ones buffers find their size. What
rises to a limit that a job of this length may not reach has a lower one (`KEPT`, `GIVEN_BACK`). That costs time, so the
other figures are of runs without it. With `--stock` the same job runs without TLT, to tell whose a leak is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.process_sizes import ObjectStore, SharedMemory, role, sizes, slope
from benchmarks.stored import store
from benchmarks.toy_job import FORCED, SAMPLES, Job, make_assets
from demo.follow import Tail
from verl_tlt.commands.compare.processes import interruptible
from verl_tlt.commands.report.reader import RunTrace, read_trace
from verl_tlt.trace.events import Session

TOLERANCE = {"memory": 0.1, "threads": 0.01, "files": 0.01, "shared_memory": 0.01, "objects": 0.02}
"""Most growth a step: MiB of a process, threads and open files of one, entries of /dev/shm, MiB in Ray's store."""
KEPT = {"RAY_task_events_max_num_task_in_gcs": "2000", "TQ_SOCKET_POOL_SIZE": "1"}
"""Tasks that Ray's control store keeps the events of (100,000 otherwise), and idle sockets of the transfer queue for
each loop and peer (4 otherwise: as many as were ever in use at once)."""
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Bytes from which on an array is mapped by itself and goes back when it is freed, so that what a process holds is what
it has. glibc would raise them up to 32 MiB and keep what is freed, in pieces."""
MARGIN_S = 0.1
STALL_S = 900.0
PROMPTS = 2
"""Of a batch."""
STOCK = (
    FORCED,
    f"data.train_batch_size={PROMPTS}",
    "data.max_response_length=320",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    "actor_rollout_ref.rollout.max_model_len=400",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "trainer.max_actor_ckpt_to_keep=2",
)
TLT = (
    "tlt.speculation.policy=fixed",
    "tlt.speculation.fixed=2",
    "tlt.speculation.calibrate=false",
    "tlt.speculation.costs_dir=null",
    "tlt.drafter.intermediate_size=null",
    "tlt.drafter.batch_tokens=768",
    "tlt.buffer.min_tokens=100",
    "tlt.buffer.keep_steps=4",
    "tlt.spot.max_epochs=1000000",
    "tlt.spot.min_merge_steps=2",
)


def lengths(index: int) -> list[int]:
    """One response of each batch keeps a replica busy; how long, and how long the others are, differs.

    Those of the first batch end at the same time: verl's pools of threads have as many as they ever get from then on.
    """
    if index < PROMPTS:
        return [40] * SAMPLES
    rng = random.Random(index)
    short = [rng.randint(4, 40) for _ in range(SAMPLES)]
    return [rng.randint(140, 300), *short[1:]] if index % 2 == 0 else short


def watch(job: Job, steps: int, minutes: float) -> list[dict[str, Any]]:
    """A look at every process after each step, until there are enough, or time is up."""
    metrics, shm, store = Tail(job.out / "metrics.jsonl"), SharedMemory(), None
    looks: list[dict[str, Any]] = []
    last = time.monotonic()
    end = last + 60 * minutes
    while len(looks) < steps and time.monotonic() < end:
        ended = job.tree.process.poll() is not None
        for line in metrics.poll():
            last = time.monotonic()
            processes = job.processes()
            if store is None:
                store = ObjectStore(processes)
            found: dict[str, Any] = {}
            for process in processes:
                with contextlib.suppress(OSError, psutil.NoSuchProcess):
                    found[f"{role(process)} {process.pid}"] = sizes(process.pid)
            looks.append(
                {
                    "step": json.loads(line)["step"],
                    "processes": found,
                    "shared_memory": shm.count(p.pid for p in processes),
                    "objects": store.used(),
                }
            )
        if ended:
            break
        if time.monotonic() - last > STALL_S + 300.0 * (not looks):
            raise TimeoutError(f"{job.out} has not ended a step for minutes; see {job.log}")
        job.processes()
        time.sleep(0.5)
    return looks


def growth(looks: Sequence[Mapping[str, Any]], last: int) -> dict[str, Any]:
    """What each process and the job as a whole held, and how it grew over the `last` looks.

    Processes that did not live through all of these are counted and left out.
    """
    looks = looks[-last:]
    names = [name for name in looks[-1]["processes"] if all(name in look["processes"] for look in looks)]
    series = {
        f"{what} of {name}": (what, [look["processes"][name][what] for look in looks])
        for name in names
        for what in ("memory", "threads", "files")
    }
    series |= {what: (what, [look[what] for look in looks]) for what in ("shared_memory", "objects")}
    rows = {
        name: {
            "first": round(values[0], 2),
            "last": round(values[-1], 2),
            "slope": round(slope(values), 4),
            "flat": slope(values) <= TOLERANCE[what],
        }
        for name, (what, values) in series.items()
    }
    everybody = {name for look in looks for name in look["processes"]}
    return {"looks": len(looks), "came_or_went": len(everybody - set(names)), "series": rows}


def judged(looks: Sequence[Mapping[str, Any]], last: int) -> dict[str, Any]:
    """What grew, against what may."""
    grown = growth(looks, last)
    steep = sorted(name for name, row in grown["series"].items() if not row["flat"])
    return {"tolerance_per_step": TOLERANCE, "not_flat": steep, "growth": grown}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest."""
    return {
        "p50": round(float(np.quantile(values, 0.5)), 4),
        "p99": round(float(np.quantile(values, 0.99)), 4),
        "max": round(max(values), 4),
    }


def stops(sessions: Sequence[Session]) -> dict[str, Any]:
    """How long sessions took to stop, and against what they may take."""
    stopped = [s for s in sessions if s.stop_latency_s is not None and s.steps and s.slowest_s]
    if not stopped:
        return {"sessions": len(sessions), "stopped": 0}
    latencies = [s.stop_latency_s or 0.0 for s in stopped]
    beyond = [latency - (s.slowest_s or 0.0) for latency, s in zip(latencies, stopped, strict=True)]
    return {
        "sessions": len(sessions),
        "stopped": len(stopped),
        "latency_s": quantiles(latencies),
        "mean_micro_batch_s": quantiles([(s.end - s.start) / s.steps for s in stopped]),
        "longest_micro_batch_s": quantiles([s.slowest_s or 0.0 for s in stopped]),
        "beyond_the_longest_micro_batch_s": quantiles(beyond),
        "within_bound": sum(b <= MARGIN_S for b in beyond),
    }


def overhead(steps: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """TLT's own work on the critical path, by phase: seconds, and share of the time of all steps but the first."""
    rows = [metrics for step, metrics in sorted(steps.items())[1:]]
    total = sum(m["timing_s/step"] for m in rows)
    names = sorted({name for m in rows for name in m if name.startswith("tlt/overhead_") and name != "tlt/overhead_s"})
    phases = {
        name.removeprefix("tlt/overhead_").removesuffix("_s"): {
            "median_s": round(statistics.median(m.get(name, 0.0) for m in rows), 4),
            "share": round(sum(m.get(name, 0.0) for m in rows) / total, 5),
        }
        for name in names
    }
    return {
        "median_step_s": round(statistics.median(m["timing_s/step"] for m in rows), 2),
        "median_s": round(statistics.median(m["tlt/overhead_s"] for m in rows), 4),
        "share": round(sum(m["tlt/overhead_s"] for m in rows) / total, 5),
        "phases": phases,
    }


def measured(trace: RunTrace) -> dict[str, Any]:
    """What the trace says."""
    return {
        "stops": stops(trace.sessions),
        "overhead": overhead(trace.steps),
        "errors": max(m.get("tlt/errors", 0.0) for m in trace.steps.values()),
        "spot_failures": sum(m.get("tlt/spot_failures", 0.0) for m in trace.steps.values()),
        "published": sum(p.decision == "published" for p in trace.publishes),
        "reverted": sum(p.decision == "reverted" for p in trace.publishes),
    }


@interruptible()
def main() -> None:
    """Run the job, judge what was seen, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=230)
    parser.add_argument("--minutes", type=float, default=120, help="after which fewer steps must do")
    parser.add_argument("--last", type=int, default=150, help="steps over which nothing may grow")
    parser.add_argument("--leaks", action="store_true", help="judge what each process holds")
    parser.add_argument("--stock", action="store_true", help="the same job without TLT")
    parser.add_argument("--work", type=Path, default=Path("demo-out/endurance"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = args.work.resolve()
    assets = make_assets(work / "assets", lengths)
    overrides = STOCK if args.stock else (*STOCK, *TLT)
    began = time.time()
    environment = {"SAVE_FREQ": "25", "TLT": "0" if args.stock else "1", **KEPT, **(GIVEN_BACK if args.leaks else {})}
    job = Job(work / "run", assets, args.steps, overrides, **environment)
    try:
        looks = watch(job, args.steps, args.minutes)
    finally:
        job.end()
    if not looks:
        raise SystemExit(f"the job ended no step; see {job.log}")
    (work / "looks.json").write_text(json.dumps(looks))
    result = {
        "tlt": not args.stock,
        "steps": len(looks),
        "minutes": round((time.time() - began) / 60, 1),
        **({} if args.stock else measured(read_trace(work / "run" / "trace"))),
        **(judged(looks, args.last) if args.leaks else {}),
    }
    print(json.dumps({name: value for name, value in result.items() if name != "growth"}, indent=1))
    if args.out:
        store(args.out, result)


if __name__ == "__main__":
    main()
