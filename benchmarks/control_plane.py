"""What TLT's control plane costs the driver by the number of replicas: the real controller, planner, watch and trace.

    python -m benchmarks.control_plane [--replicas 8 64 256 1024]

The fleet is the tests' (plain objects, no Ray), so a call costs nothing: what is left is our own code. Each RL step
samples for two seconds, in which loads change all the time, half of the replicas run dry, leave and train; then come
log-probs, merge, publication and weight sync. Counted are CPU seconds of the trainer's thread in each hook (critical
path), those of a look at the fleet, bytes of trace, and of memory that a step leaves behind. A power law is fitted.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.parts import machine
from verl_tlt.config import TLTConfig
from verl_tlt.idle.modes import MODE_RULES
from verl_tlt.messages.training import DrafterProvenance
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.controller import Controller
from verl_tlt.trainer.run_setup import FirstDrafter, RunFacts
from verl_tlt.trainer.watch import PendingWork

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "control_plane.json"
SAMPLING_S = 2.0
STEPS = 4
"""RL steps of each size; the first fills the buffers and is left out."""


def build(replicas: int, folder: Path) -> tuple[Controller, Any]:
    """A controller at the end of its set-up, and its fleet."""
    from fake_fleet import FakeFleet
    from rl_steps import FIRST

    settings = {"trace": {"dir": str(folder / "trace")}, "drafter": {"save_dir": str(folder / "drafter")},
                "buffer": {"min_tokens": 100}, "spot": {"settle_s": 0.0}}  # fmt: skip
    fleet = FakeFleet(*(f"10.{i // 250}.{i % 250}.7:{40000 + i}" for i in range(replicas)))
    facts = RunFacts(
        rule=MODE_RULES["sync"], requests=4 * replicas, dtype="bfloat16", checkpoints=folder, prunes=False,
        provenance=DrafterProvenance("policy", "data", None, "hass", 1.0), gpus=replicas,
    )  # fmt: skip
    controller = Controller(
        TLTConfig.from_dict(settings), facts, FirstDrafter(FIRST, FIRST, (2, 4, 6), "a benchmark"), fleet,
        TraceWriter(str(folder / "trace"), "trainer"), PendingWork,
    )  # fmt: skip
    controller.before_first_sync(0, None)
    fleet.sync()
    controller.after_first_sync(0)
    return controller, fleet


def sample(fleet: Any, seed: int) -> float:
    """Loads change; after a moment half of the replicas run dry. Returns CPU seconds that this itself took."""
    rng, names, begin = np.random.default_rng(seed), list(fleet.replicas), time.thread_time()
    deadline, dry = time.monotonic() + SAMPLING_S, time.monotonic() + 0.3 * SAMPLING_S
    while time.monotonic() < deadline:
        half = names[len(names) // 2 :] if time.monotonic() > dry else names
        fleet.load |= {names[int(i)]: int(rng.integers(1, 9)) for i in rng.integers(0, len(names), 3)}
        if half is not names:
            fleet.load |= dict.fromkeys(half, 0)
        time.sleep(0.02)
    return time.thread_time() - begin


def one_step(controller: Controller, fleet: Any, step: int) -> dict[str, float]:
    """Seconds of every hook, and of the watch; looks."""
    found: dict[str, float] = {}
    looks = [0]
    seen = fleet.inflight

    def inflight() -> dict[str, int]:
        looks[0] += 1
        return dict(seen())

    def timed(name: str, hook: Callable[..., Any], *arguments: Any) -> None:
        begin = time.thread_time()
        hook(*arguments)
        found[name] = time.thread_time() - begin

    fleet.inflight = inflight
    fleet.load = dict.fromkeys(fleet.replicas, 4)
    timed("sample_begin", controller.sample_begin, step)
    before = time.process_time()
    own = sample(fleet, step)
    found["watch"] = time.process_time() - before - own
    found["looks"] = looks[0]
    fleet.inflight = seen
    timed("sample_end", controller.sample_end, step, True)
    timed("log_probs_done", controller.log_probs_done, step)
    while controller._merging is not None and not controller._merging.done():
        time.sleep(0.002)
    timed("before_sync", controller.before_sync, step)
    fleet.sync()
    timed("after_sync", controller.after_sync, step, False)
    timed("metrics", controller.metrics, step, {"timing_s/gen": SAMPLING_S})
    return found


def measure(replicas: int) -> dict[str, float]:
    """Medians over steps."""
    with tempfile.TemporaryDirectory(prefix="tlt-control-plane-") as scratch:
        folder = Path(scratch)
        controller, fleet = build(replicas, folder)
        rows, sizes, memory = [], [], []
        for step in range(1, STEPS + 1):
            rows.append(one_step(controller, fleet, step))
            sizes.append(sum(f.stat().st_size for f in (folder / "trace").glob("*.jsonl")))
        tracemalloc.start()  # costs time, so it watches steps of its own
        for step in range(STEPS + 1, STEPS + 3):
            one_step(controller, fleet, step)
            fleet.calls.clear()
            memory.append(tracemalloc.get_traced_memory()[0])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        controller._pool.shutdown(wait=True)
    hooks = ("sample_begin", "sample_end", "log_probs_done", "before_sync", "after_sync", "metrics")
    middle = {name: statistics.median(row[name] for row in rows[1:]) for name in (*hooks, "watch", "looks")}
    return {
        "replicas": replicas,
        **{f"{name}_ms": round(1e3 * middle[name], 3) for name in hooks},
        "critical_path_ms": round(1e3 * sum(middle[name] for name in hooks), 3),
        "look_ms": round(1e3 * middle["watch"] / max(middle["looks"], 1), 3),
        "looks": middle["looks"],
        "trace_kb_per_step": round(statistics.median(b - a for a, b in pairwise(sizes)) / 1024, 1),
        "memory_left_kb_per_step": round((memory[1] - memory[0]) / 1024, 1),
        "memory_peak_kb": round(peak / 1024, 1),
        "errors": float(controller.guard.counts.total()),
    }


def growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """Exponent of the power law through each figure, by least squares on logarithms."""
    found = {}
    for name in ("critical_path_ms", "look_ms", "trace_kb_per_step", "memory_peak_kb"):
        x = np.log([row["replicas"] for row in rows])
        found[name] = round(float(np.polyfit(x, [math.log(max(row[name], 1e-3)) for row in rows], 1)[0]), 2)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "trainer"))
    rows = []
    for count in args.replicas:
        rows.append(measure(count))
        print(json.dumps(rows[-1]), flush=True)
    found = {"machine": machine(), "sampling_s": SAMPLING_S, "rows": rows, "exponents": growth(rows)}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(found["exponents"])


if __name__ == "__main__":
    main()
