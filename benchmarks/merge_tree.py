"""What a merge of many spot workers costs on its critical path: one worker's share, with arrays of real size.

    python -m benchmarks.merge_tree --out benchmarks/results/merge_tree.json

A merge is: every worker hands its change in (`hand_in`), some workers average slices on each level of the tree
(`average_slice`), every worker adopts the result. In each part no worker does more than its share, however many there
are, so what one worker does is the critical path. It is measured here with as many numbers as it has at full size;
workers run side by side in a run, of which there are not enough cores here. What the network takes is not measured: the
bytes that a worker reads are counted.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.stored import store
from verl_tlt.drafter.train import move_average
from verl_tlt.spot_worker.merge import THREADS, added, average_slice, hand_in, session_facts
from verl_tlt.trainer.replica_workers import FAN_IN

HIDDEN = 4096


def drafter(parameters: int, rng: np.random.Generator, size: float) -> dict[str, np.ndarray]:
    """Matrices of a drafter, float32, `parameters` numbers in all."""
    rows = parameters // HIDDEN
    cuts = {"fc.weight": 3, "q_proj": 2, "o_proj": 1, "gate_proj": 3, "up_proj": 3, "down_proj": 3}
    unit = rows // sum(cuts.values())
    return {n: size * rng.standard_normal((unit * share, HIDDEN), dtype=np.float32) for n, share in cuts.items()}


def seconds(call: Callable[[], Any], turns: int) -> tuple[float, float]:
    """(seconds by the clock, CPU seconds of all threads), least of `turns` turns: others use the machine, too."""
    taken = []
    for _ in range(turns):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in taken), min(cpu for _, cpu in taken)


def main() -> None:
    """Measure, print, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=300_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    base = drafter(options.parameters, rng, 0.02)
    now = {name: value + np.float32(1e-4) for name, value in base.items()}
    facts = [session_facts(f"worker-{i}", 50_000, 40, min_steps=8) for i in range(FAN_IN)]
    levels = max(1, math.ceil(math.log(options.replicas, FAN_IN) - 1e-9))

    handing = seconds(lambda: hand_in(facts[0], now, base, FAN_IN), options.turns)
    slices = hand_in(facts[0], now, base, FAN_IN)
    # One of each member's slices: what the first of a group reads.
    parts = [type(slices[0])(f, slices[0].values.copy(), slices[0].scales, slices[0].lengths) for f in facts]
    joining = seconds(lambda: average_slice(parts, last=True), options.turns)
    weights, averages = ({name: torch.from_numpy(value.copy()) for name, value in now.items()} for _ in range(2))
    adopting = seconds(lambda: move_average(weights, averages, added(base, slices)), options.turns)

    size = sum(value.size for value in base.values())
    delta = sum(part.values.nbytes + part.scales.nbytes for part in slices)

    def rounded(pair: Sequence[float]) -> dict[str, float]:
        return {"clock": round(pair[0], 3), "cpu": round(pair[1], 3)}

    found = {
        "parameters": size,
        "replicas": options.replicas,
        "levels": levels,
        "hand_in_s": rounded(handing),
        "join_s_per_level": rounded(joining),
        "adopt_s": rounded(adopting),
        "tree_s": rounded([levels * each for each in joining]),
        "critical_path_s": rounded([h + levels * j + a for h, j, a in zip(handing, joining, adopting, strict=True)]),
        "delta_gb": round(delta / 1e9, 3),
        "read_gb_per_worker": round((levels + 1) * delta * (FAN_IN - 1) / FAN_IN / 1e9, 3),
        "whole_float32_to_one_worker_gb": round(4 * size * (options.replicas - 1) / 1e9, 1),
        "threads": THREADS,
    }
    print(json.dumps(found, indent=1))
    if options.out:
        store(options.out, found)


if __name__ == "__main__":
    main()
