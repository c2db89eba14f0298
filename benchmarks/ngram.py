"""What n-gram drafts cost the scheduler's thread: time in the index per engine step, by batch size.

    python -m benchmarks.ngram

Responses are made; a given share of their tokens is said by a sibling too. What giving up async scheduling costs, which
n-grams need, takes a GPU to measure and is not in these figures.
"""

from __future__ import annotations

import random
import statistics
import time

from verl_tlt.speculation.ngram_index import NgramIndex

BATCHES, GROUP, STEPS = (1, 16, 64, 256), 8, 400


def index_cost(batch: int, shared: float, draft_length: int = 3) -> list[float]:
    """Seconds that each of STEPS engine steps of `batch` requests spends in the index."""
    rng = random.Random(0)
    index = NgramIndex(max_bytes=1 << 30)
    spoken = [[rng.randrange(30_000) for _ in range(STEPS)] for _ in range(-(-batch // GROUP))]
    names = [f"request-{i}" for i in range(batch)]
    for i, name in enumerate(names):
        index.begin(name, [i // GROUP] * 32)
    seconds = []
    for step in range(STEPS):
        tokens = [[spoken[i // GROUP][step] if rng.random() < shared else rng.randrange(30_000)] for i in range(batch)]
        start = time.perf_counter()
        for name, new in zip(names, tokens, strict=True):
            index.extend(name, new)
        for name in names:
            index.propose(name, draft_length)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Print the table."""
    print("batch   shared   median us   us a request")
    for shared in (0.0, 0.9):
        for batch in BATCHES:
            median = statistics.median(index_cost(batch, shared)) * 1e6
            print(f"{batch:5d}   {shared:6.1f}   {median:9.0f}   {median / batch:12.2f}")


if __name__ == "__main__":
    main()
