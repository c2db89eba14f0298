"""Which sequences of a batch have their hidden states captured.

Hidden states are large, so few sequences are chosen, and long ones are cut to a window.
"""

import math
import random
from collections.abc import Sequence

import numpy as np


def select_sequences(lengths: Sequence[int], budget_tokens: int, rng: random.Random, window: int) -> list[int]:
    """Choose sequences to capture so that every length gets its share of the tokens, by systematic sampling.

    The expected captured tokens of a sequence are proportional to its length, up to all of it. Where the draw exceeds
    the budget, sequences picked at random are dropped. Returns indices into `lengths` (tokens of prompt and response),
    ascending; their costs min(length, window) sum to at most `budget_tokens`, and `window` is at most that.
    """
    if not lengths or budget_tokens <= 0:
        return []
    order = list(range(len(lengths)))
    rng.shuffle(order)  # equal lengths: no preference for the first row
    order.sort(key=lambda i: -lengths[i])
    length = np.array([lengths[i] for i in order], dtype=np.float64)  # [N], descending
    cost = np.minimum(length, window)
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
    """Chances [N] to be drawn, min(1, factor * size), whose expected cost is `budget`; all 1 if everything fits.

    `size`, [N], is descending, so the sequences whose chance is 1 come first.
    """
    if cost.sum() <= budget:
        return np.ones_like(cost)
    cost_before = np.cumsum(cost) - cost
    weight_from_here = np.cumsum((size * cost)[::-1])[::-1]
    factor = (budget - cost_before) / weight_from_here  # [N]: factor[i] holds if exactly the first i have chance 1
    first_below_one = np.argmax(factor * size <= 1)
    return np.minimum(1.0, factor[first_below_one] * size)


def capture_turns(tokens: int, ranks: int, window: int) -> int:
    """In how many batches a rank captures once: so many that its share of them, tokens / ranks of each, is a window."""
    return max(1, math.ceil(min(window, tokens) * ranks / max(1, tokens)))


def turn_budget(budget: int, turns: int, batch: int, rank: int) -> int:
    """Tokens that a rank captures of batch number `batch`: `budget` in one of `turns` batches, else none."""
    return budget if (batch + rank) % turns == 0 else 0


def choose_window(length: int, prompt_len: int, window: int, rng: random.Random) -> tuple[int, int]:
    """At most `window` neighbouring tokens of one sequence: (start, stop), 0 <= start < stop <= length.

    The start is the later of two uniform draws from the response, as late positions are those decoded in the tail.
    """
    last_start = max(0, length - window)
    first_start = min(prompt_len, last_start)
    start = max(rng.randint(first_start, last_start), rng.randint(first_start, last_start))
    return start, min(length, start + window)
