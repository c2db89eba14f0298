"""Packed against padded micro-batches: sequences a second in drafter training on a long-tailed mix of lengths.

    python -m benchmarks.drafter.packing --out benchmarks/results/drafter_packing.json

Same model, same loss, same sequences. Packed: the plugin's own micro-batches of `--budgets` rows
(`Buffer.sample_batch`, `pack`). Padded: groups of as many sequences in random order as a packed batch holds on average,
each filled up on the right to the longest of its group: what a training loop does that knows nothing of packing. So
both learn the same in as many optimizer steps. (The library's model takes one row at a time, so the rows of a group run
one after the other before its optimizer step, which on one CPU thread costs what a batch of them would; attention never
spans two sequences.) Runs alternate; the figure for each batch size is the median of the ratios, with all beside it.
Time is the CPU time of the one thread that trains.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.stored import store
from demo.toy import task
from verl_tlt.drafter import Batch, DrafterTrainer, TrainingSequence, align, build_drafter, pack
from verl_tlt.spot_worker.buffer import Buffer


def long_tailed(count: int, median: int, sigma: float, longest: int, seed: int) -> list[int]:
    """Log-normal lengths, as rollouts of reasoning models have them; with `median` 0 those of the toy's responses."""
    rng = random.Random(seed)
    if not median:
        return [min(longest, task.sample_length(task.sample_problem(rng), rng)) for _ in range(count)]
    return [min(longest, max(8, round(median * rng.lognormvariate(0.0, sigma)))) for _ in range(count)]


def trainer(hidden: int, vocabulary: int) -> DrafterTrainer:
    """A random drafter of a policy of this size, its frozen parts random as well."""
    policy = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "vocab_size": vocabulary,
        "num_hidden_layers": 6, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
        "head_dim": 64, "intermediate_size": 3 * hidden, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }  # fmt: skip
    model = build_drafter(policy, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.isnan().any():
                parameter.data = torch.empty(parameter.shape).normal_(0.0, 0.02)
    return DrafterTrainer(model, learning_rate=1e-4)


def sequences_of(lengths: list[int], hidden: int, vocabulary: int) -> list[TrainingSequence]:
    """Random rollouts with a prompt of up to 32 tokens."""
    generator = torch.Generator().manual_seed(0)
    return [
        TrainingSequence(
            tokens=torch.randint(vocabulary, (n,), generator=generator),
            prompt_len=min(32, n // 4),
            aux=torch.randn(n, 3 * hidden, generator=generator).bfloat16(),
            last=torch.randn(n, hidden, generator=generator).bfloat16(),
        )
        for n in lengths
    ]


def padded_batches(sequences: list[TrainingSequence], rows: int, rng: random.Random) -> list[list[Batch]]:
    """All sequences once, in random order, in groups filled up to the longest of each."""
    order = rng.sample(sequences, len(sequences))
    groups = [[align(s) for s in order[i : i + rows]] for i in range(0, len(order), rows)]
    return [[_filled(batch, max(b.rows for b in group)) for batch in group] for group in groups]


def _filled(batch: Batch, rows: int) -> Batch:
    """With rows of padding at the end."""
    return batch.padded(rows) if batch.rows < rows else batch


def packed_batches(sequences: list[TrainingSequence], budget: int, rng: random.Random) -> list[list[Batch]]:
    """All sequences once, as a session draws them."""
    buffer = Buffer(max_bytes=2**40, keep_steps=1, held_out=0.0)
    for i, s in enumerate(sequences):
        buffer.add(0, i, s)
    buffer.begin_session(max_epochs=1.0)
    batches = []
    while not buffer.exhausted():
        batches.append([pack([window for window in buffer.sample_batch(rng, budget) if len(window) > 1])])
    return batches


def samples_per_second(learner: DrafterTrainer, steps: list[list[Batch]], count: int) -> float:
    """One pass on one thread, in seconds of its CPU: what a machine without neighbours would take."""
    begin = time.process_time()
    for rows in steps:
        for batch in rows:
            loss, _ = learner._forward(batch.to("cpu", torch.float32).for_passes(learner.ttt_steps))
            torch.autograd.backward(loss / len(rows))
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
    return count / (time.process_time() - begin)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--median", type=int, default=96, help="of the lengths; 0: the toy's own mix")
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024, 2048], help="rows of a packed batch")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = long_tailed(options.sequences, options.median, options.sigma, options.longest, seed=0)
    sequences = sequences_of(lengths, options.hidden, options.vocabulary)
    learner = trainer(options.hidden, options.vocabulary)
    mean = sum(lengths) / len(lengths)
    groups = {budget: max(1, round(budget / mean)) for budget in options.budgets}  # sequences of a padded batch
    pairs = {f"packed {budget}": f"padded {n}" for budget, n in groups.items()}
    arms: dict[str, Callable[[random.Random], list[list[Batch]]]] = {
        **{f"packed {n}": lambda rng, n=n: packed_batches(sequences, n, rng) for n in options.budgets},
        **{f"padded {n}": lambda rng, n=n: padded_batches(sequences, n, rng) for n in groups.values()},
    }
    speed: dict[str, list[float]] = {name: [] for name in arms}  # samples per CPU second
    rows: dict[str, int] = {}
    samples_per_second(
        learner, arms[f"packed {options.budgets[0]}"](random.Random(9))[:1], 1
    )  # first use of everything
    for turn in range(options.repeats):
        for name, make in arms.items():
            batches = make(random.Random(turn))  # made outside of the clock on both sides
            rows[name] = sum(b.rows for step in batches for b in step)
            speed[name].append(samples_per_second(learner, batches, len(sequences)))
        print({name: round(values[-1], 2) for name, values in speed.items()}, flush=True)
    ratios = {
        f"{packed} over {padded}": [a / b for a, b in zip(speed[packed], speed[padded], strict=True)]
        for packed, padded in pairs.items()
    }
    result: dict[str, Any] = {
        "samples_per_cpu_s": {name: [round(v, 3) for v in values] for name, values in speed.items()},
        "computed_rows": rows,
        "tokens": sum(lengths),
        "ratio_median": {pair: round(statistics.median(values), 3) for pair, values in ratios.items()},
        "ratios": {pair: [round(r, 3) for r in values] for pair, values in ratios.items()},
        "settings": {k: v for k, v in vars(options).items() if k != "out"},
    }
    store(options.out, result)
    print(result["ratio_median"], result["ratios"])


if __name__ == "__main__":
    main()
