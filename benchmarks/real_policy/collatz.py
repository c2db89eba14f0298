"""Collatz chains for a language model of 135M parameters: short prompts, and responses with a long tail.

    How many Collatz steps bring 604 below 100?

    Step 1, half is 302. Now cut to 151 (2). Odd, so 454: 3. Halved, 227, 4. [...] Below 100 after 11.

An even number is halved, an odd one is tripled and 1 is added. Most numbers need a few steps, and some need eighty. The
form of each sentence is drawn. One prompt in `EVERY` is about a long chain.

Chains merge, but two that share a step also share their last one. So the last number from which a step is taken decides
on which side a prompt is, and a prompt of the warm-up has no step in common with a prompt of a run.
"""

import random
import re
from itertools import pairwise
from typing import Any, Literal

Side = Literal["warm-up", "run"]
Row = dict[str, Any]

DATA_SOURCE = "collatz"
SYSTEM = "Count Collatz steps."
LIMIT, NUMBERS, HIGHEST = 100, 3000, 30_000
"""A chain ends with the first number below `LIMIT`, starts below `NUMBERS` and stays below `HIGHEST`."""
EVERY, FEW, MANY = 8, (1, 8), (50, 75)
"""One prompt in so many has a long chain; steps of a short and of a long one, from and to."""
ASKED = (
    "How many Collatz steps bring {n} below 100?",
    "Collatz steps from {n} until below 100?",
    "Start at {n}. Count the Collatz steps to a number below 100.",
    "Follow {n} down the Collatz chain and stop below 100. How many steps?",
    "Apply the Collatz rule to {n} until it drops under 100 and count.",
    "Count: {n}, Collatz, below 100.",
    "When does the Collatz chain of {n} first go below 100?",
    "After how many Collatz steps is {n} smaller than 100?",
)
FRAMES = (
    "{i}. {Act} {m}.",
    "{Act} {m}, {i}.",
    "Now {act} {m} ({i}).",
    "{Act} {m}: {i}.",
    "Step {i}, {act} {m}.",
    "So {act} {m}; {i}.",
)
HALVED = ("half is", "halved,", "even, so", "divided,", "cut to", "down to")
TRIPLED = ("triple plus 1 is", "tripled,", "odd, so", "times 3,", "raised to", "up to")
ENDS = ("That took {i} steps.", "So the answer is {i}.", "Below 100 after {i}.")


def chain(n: int) -> list[int]:
    """The number and all that follow it, to the first below the limit."""
    found = [n]
    while found[-1] >= LIMIT:
        found.append(3 * found[-1] + 1 if found[-1] % 2 else found[-1] // 2)
    return found


def side_of(n: int) -> Side:
    """The side of prompts about this number. All chains that share a step have the same side."""
    last = chain(n)[-2]  # even, from 100 to 198
    return "warm-up" if last // 2 % 2 else "run"


def _by_steps(many: bool) -> dict[Side, dict[int, list[int]]]:
    """Numbers by side and by the steps of their chain."""
    found: dict[Side, dict[int, list[int]]] = {"warm-up": {}, "run": {}}
    low, high = MANY if many else FEW
    for n in range(LIMIT, NUMBERS):
        numbers = chain(n)
        steps = len(numbers) - 1
        if low <= steps <= high and max(numbers) < HIGHEST:
            found[side_of(n)].setdefault(steps, []).append(n)
    return found


CHAINS = {many: _by_steps(many) for many in (False, True)}


def draw(rng: random.Random, many: bool, side: Side) -> tuple[str, str, int]:
    """A question, its solution and the answer."""
    by_steps = CHAINS[many][side]
    steps = rng.choice(sorted(by_steps))
    numbers = chain(rng.choice(by_steps[steps]))
    said = []
    for i, (n, m) in enumerate(pairwise(numbers), start=1):
        act = rng.choice(TRIPLED if n % 2 else HALVED)
        said.append(rng.choice(FRAMES).format(i=i, act=act, Act=act.capitalize(), m=m))
    said.append(rng.choice(ENDS).format(i=steps))
    return rng.choice(ASKED).format(n=numbers[0]), " ".join(said), steps


def chat(asked: str) -> list[dict[str, str]]:
    """A prompt, as turns of a chat."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]


def prompt_row(rng: random.Random, split: str, index: int, side: Side = "run") -> Row:
    """One prompt in verl's columns."""
    asked, _, answer = draw(rng, index % EVERY == EVERY - 1, side)
    return {
        "data_source": DATA_SOURCE,
        "prompt": chat(asked),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"index": index, "split": split},
    }


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """The reward, in the form of verl's `reward.custom_reward_function`: 1.0 if the last number is right, else 0.0."""
    return float(re.findall(r"\d+", solution_str)[-1:] == [ground_truth])
