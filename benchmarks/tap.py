"""What the hidden-state tap costs: old-log-prob forwards of verl's FSDP2 engine with it and without, on this machine.

    VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda python -m benchmarks.tap --out benchmarks/results/tap.json

The toy's policy in float32 on one process of one thread, packed batches. Forwards with and without the tap take turns,
so that both see the same machine; medians are compared. What the tap itself says it took (`tlt/overhead_tap_s` in a
run) stands beside.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))  # builds verl's actor without Ray

import torch
from actor import build_actor, free_port, make_batch, make_rows

from benchmarks.stored import store

LENGTHS = [(32, n) for n in (40, 60, 80, 100, 120, 160, 200, 280, 400, 600)]
ROUNDS = 15


def forward(actor: Any, rows: Any, budget: int | None) -> tuple[float, float, int, int]:
    """One old-log-prob forward: (seconds, the tap's own seconds, tokens kept, bytes kept); None: without the tap."""
    tap = actor.tap
    actor.tap_budget, actor.tap_window = budget or 0, 10_000
    if budget is None:
        actor.tap = None
    batch = make_batch(rows, 1024, compute_loss=False)
    start = time.perf_counter()
    actor.infer_batch(batch)
    seconds = time.perf_counter() - start
    actor.tap = tap
    shards = tap.take() if budget is not None else []
    return seconds, tap.seconds, sum(len(s.tokens) for s in shards), sum(s.states.nbytes for s in shards)


def main() -> None:
    """Measure, print a table, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    actor, rows = build_actor(port=free_port()), make_rows(LENGTHS)
    total = sum(len(tokens) for tokens, _ in rows)
    budgets = {"without a tap": None, "nothing chosen": 0, "a quarter chosen": total // 4, "everything chosen": total}
    found: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in budgets}
    for round_ in range(ROUNDS + 2):
        for name, budget in budgets.items():
            measured = forward(actor, rows, budget)
            if round_ >= 2:  # the first ones use everything for the first time
                found[name].append(measured)
    figures = {
        name: {
            "forward_ms": round(1e3 * statistics.median(m[0] for m in measured), 2),
            "tap_ms": round(1e3 * statistics.median(m[1] for m in measured), 2) if budgets[name] is not None else 0.0,
            "tokens_kept": statistics.median(m[2] for m in measured),
            "mb_kept": round(statistics.median(m[3] for m in measured) / 1e6, 2),
        }
        for name, measured in found.items()
    }
    for name, row in figures.items():
        print(f"{name:18}", *(f"{key} {value:>9}" for key, value in row.items()))
    if out:
        store(out, {"tokens": total, "rounds": ROUNDS, "figures": figures})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
