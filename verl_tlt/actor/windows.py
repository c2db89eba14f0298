"""Which sequences the tap captures, and which window of each: decided before the forward that computes them.

Hidden states are heavy (28-64 KB a token for 7B-70B policies), so sequences are chosen beforehand and long ones are cut
to a window. A sequence counts by its tokens: otherwise the long tail, which speculation is for, would be
underrepresented.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from verl_tlt.messages.training import HiddenStateShard


def select_for_tap(
    lengths: Sequence[int], budget_tokens: int, rng: random.Random, window: int | None = None
) -> list[int]:
    """Choose sequences to capture so that every length gets its share of the tokens.

    Systematic sampling along the sequences in order of length: the chosen ones are spread evenly over all lengths, and
    the expected captured tokens of each are proportional to its length (up to capturing all of it). Where the draw
    exceeds the budget some of it, chosen blindly, is given up.

    Args:
        lengths: tokens of each sequence, prompt and response.
        budget_tokens: most tokens to capture.
        rng: the same state gives the same choice.
        window: most tokens captured of one sequence, at most the budget (`choose_window`); None: whole sequences.

    Returns:
        Indices into `lengths`, ascending; their costs min(length, window) sum to at most `budget_tokens`.
    """
    if not lengths or budget_tokens <= 0:
        return []
    longest = min(window or budget_tokens, budget_tokens)
    order = list(range(len(lengths)))
    rng.shuffle(order)  # equal lengths: no preference for the first row
    order.sort(key=lambda i: -lengths[i])
    length = np.array([lengths[i] for i in order], dtype=np.float64)  # [N], descending
    cost = np.minimum(length, longest)
    chance = _chances(length / np.maximum(cost, 1), cost, budget_tokens)
    # One draw at every whole number of the running sum of chances, from a random offset.
    reached = np.floor(np.cumsum(chance) + rng.random() + 1e-9)
    drawn = np.diff(reached, prepend=0.0) > 0
    chosen = [(order[k], int(cost[k])) for k in np.flatnonzero(drawn)]
    spent = sum(c for _, c in chosen)
    while spent > budget_tokens:
        spent -= chosen.pop(rng.randrange(len(chosen)))[1]
    return sorted(i for i, _ in chosen)


def _chances(size: np.ndarray, cost: np.ndarray, budget: int) -> np.ndarray:
    """Chances [N] proportional to `size`, at most 1, whose expected cost is the budget (or 1 where all fits)."""
    low, high = 0.0, 1.0  # sizes are at least 1, so a factor of 1 chooses everything
    if cost.sum() <= budget:
        return np.ones_like(cost)
    for _ in range(60):  # bisection to the precision of a double
        factor = (low + high) / 2
        if (np.minimum(1.0, factor * size) * cost).sum() > budget:
            high = factor
        else:
            low = factor
    return np.minimum(1.0, low * size)


def choose_window(length: int, prompt_len: int, window: int, rng: random.Random) -> tuple[int, int]:
    """At most `window` neighbouring tokens of one sequence: (start, stop), 0 <= start < stop <= length.

    The start is drawn from the response with a density rising towards the end (the later of two uniform draws): late
    positions are those decoded in the tail. The prompt, which teaches nothing, is kept only where it fits.
    """
    last_start = max(0, length - window)
    first_start = min(prompt_len, last_start)
    start = max(rng.randint(first_start, last_start), rng.randint(first_start, last_start))
    return start, min(length, start + window)


def shards_by_worker(shards: Sequence[HiddenStateShard], workers: int) -> list[list[HiddenStateShard]]:
    """Shards for each of so many spot workers, by row: every rank of a group splits the same rows in the same way."""
    return [[shard for shard in shards if shard.row % workers == worker] for worker in range(workers)]
