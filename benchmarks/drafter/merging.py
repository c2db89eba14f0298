"""What merging is worth: several workers that merge, against each alone and against one with all their tokens.

    python -m benchmarks.drafter.merging --out benchmarks/results/drafter_merging.json

Workers train on sequences of their own, in sessions as short as a bubble, and merge after each as in a run (local SGD,
weighted by tokens). All are judged on the same held-out sequences; differences are paired and bootstrapped by sequence.
The policy is the toy's, the texts are demonstrations of its task.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.drafter.learners import merge, score
from benchmarks.drafter.study import CONFIG, K, new_drafter
from benchmarks.drafter.trajectory import SHIPPED_POLICY, Taught, capture
from benchmarks.stored import store
from demo.toy import task
from verl_tlt.drafter import TrainingSequence, to_drafter_file
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import HeldOutScores, RolloutSampling, VerifierArrays
from verl_tlt.spot_worker.buffer import Buffer
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.scoring import counts
from verl_tlt.trainer.gate import relative_interval

TEXTS, HELD_OUT = 100, 48
"""Sequences of each worker, and those all are judged on."""
STEPS = (12, 32)
"""Micro-batches of a full session, shorter and longer than the warm-up; an unequal worker makes a quarter of them, of
which a merge leaves out fewer than `tlt.spot.min_merge_steps` and takes them in later."""


def demonstrations(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Worked additions, cut at 320 tokens: (ids, prompt length)."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        problem = task.sample_problem(rng)
        prompt = task.prompt_tokens(problem)
        words = [*prompt, *task.sample_response(problem, rng)][:320]
        texts.append(([task.TOKEN_ID[w] for w in words], len(prompt)))
    return texts


class Team:
    """Workers from one random head, each with its share of the sequences."""

    def __init__(self, shares: list[list[TrainingSequence]], weights: VerifierArrays, seed: int) -> None:
        file = DrafterFile(0, *to_drafter_file(new_drafter(seed), "float32"), acceptance=(0.0,))
        sampling = RolloutSampling(temperature=1.0, top_p=1.0, top_k=-1)
        self.workers = [
            SpotLearner(f"worker-{seed}-{i}", CONFIG, str(SHIPPED_POLICY), file, sampling, "cpu")
            for i in range(len(shares))
        ]
        for worker, share in zip(self.workers, shares, strict=True):
            worker.buffer = Buffer(max_bytes=2**40, keep_steps=1, held_out=0.0)  # judged on sequences of nobody's
            worker.add(0, share, weights)

    def session(self, steps: list[int]) -> None:
        """Each worker trains that many micro-batches; then all merge."""
        for worker, count in zip(self.workers, steps, strict=True):
            last = worker.trainer.steps + count
            worker.train(lambda w=worker, last=last: w.trainer.steps >= last)
        merge(self.workers)

    def counts(self, sequences: list[TrainingSequence]) -> np.ndarray:
        """[S, 1+K], see `HeldOutScores`: of the candidate."""
        return counts(score(self.workers[0], sequences, ["candidate"], K)["candidate"], K)


def compare(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Accept length of `a` relative to `b`, minus one, with its paired 95 % interval."""
    scores = HeldOutScores(np.arange(len(a)), np.ones(len(a), dtype=np.int64), a, b, b)
    low, high = relative_interval(scores, "served", error=0.025, seed=0)
    tau = scores.taus()
    return {"mean": round(tau["candidate"] / tau["served"] - 1, 4), "low": round(low, 4), "high": round(high, 4)}


def one_seed(seed: int, sessions: int, steps: int) -> dict[str, Any]:
    """All variants of one seed; two workers, with equal and with unequal bubbles."""
    policy = Taught(SHIPPED_POLICY)
    sequences = capture(policy, demonstrations(2 * TEXTS + HELD_OUT, seed))
    weights = policy.verifier_weights()
    left, right, held_out = sequences[:TEXTS], sequences[TEXTS : 2 * TEXTS], sequences[2 * TEXTS :]
    variants = {
        "merged": (Team([left, right], weights, seed), [steps, steps]),
        "left_alone": (Team([left], weights, seed), [steps]),
        "right_alone": (Team([right], weights, seed), [steps]),
        "one_with_all_tokens": (Team([left + right], weights, seed), [2 * steps]),
        "merged_unequal": (Team([left, right], weights, seed), [steps, steps // 4]),
    }
    out: dict[str, Any] = {"seed": seed, "sessions": []}
    for _ in range(sessions):
        seen = {}
        for name, (team, steps_each) in variants.items():
            team.session(steps_each)
            seen[name] = team.counts(held_out)
        row: dict[str, Any] = {f"tau_{n}": round(float(c.sum() / c[:, 0].sum()), 4) for n, c in seen.items()}
        alone = max(("left_alone", "right_alone"), key=lambda n: row[f"tau_{n}"])
        row["merged_vs_better_alone"] = compare(seen["merged"], seen[alone])
        row["merged_vs_one_with_all_tokens"] = compare(seen["merged"], seen["one_with_all_tokens"])
        row["merged_unequal_vs_better_alone"] = compare(seen["merged_unequal"], seen["left_alone"])
        out["sessions"].append(row)
        print(steps, seed, row, flush=True)
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        {"micro_batches": steps, "seeds": [one_seed(seed, options.sessions, steps) for seed in options.seeds]}
        for steps in options.steps
    ]
    store(options.out, {"lengths": found})


if __name__ == "__main__":
    main()
