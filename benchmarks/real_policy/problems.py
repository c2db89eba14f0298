"""Word problems that a language model of 135M parameters solves about every second time: prompts and reward.

    Mia has 6 shells and Ben has 9 shells. How many shells do they have together?

    Mia has 6 shells. Ben has 9 shells. To find how many shells they have together, add the two numbers.
    6 + 9 = 15
    Together Mia and Ben have 15 shells. The answer is 15.

Two solved problems come first in every prompt, as turns of the chat: without them the model writes about anything, and
is right once in ten times. One prompt in `EVERY` asks for the sum of many. Its response is several times as long and
often has no end; the model does not solve it.
"""

import random
import re
from functools import cache
from typing import Any

DATA_SOURCE = "word_problems"
NAMES = (
    *("Ava", "Ben", "Carla", "Dev", "Elif", "Femi", "Gus", "Hana", "Ivo", "Jun"),
    *("Kira", "Leo", "Mia", "Nils", "Ola", "Pia", "Quin", "Rosa", "Sam", "Tia"),
)
THINGS = ("apples", "pencils", "marbles", "stickers", "books", "coins", "cards", "shells", "cookies", "stamps")
EXAMPLES = 2
SYSTEM = "You solve word problems."
EVERY, MANY = 12, (10, 14)
"""One prompt in so many is about so many people, the others about two."""


def ask_many(rng: random.Random) -> tuple[str, int]:
    """A problem about many people, and its answer."""
    names, things = rng.sample(NAMES, rng.randint(*MANY)), rng.choice(THINGS)
    numbers = [rng.randint(2, 12) for _ in names]
    first, *others, last = (f"{name} has {number}" for name, number in zip(names, numbers, strict=True))
    listed = ", ".join((f"{first} {things}", *others))
    return f"{listed} and {last}. How many {things} do they have together?", sum(numbers)


def draw(rng: random.Random) -> tuple[str, str, int]:
    """A problem about two people, its solution and the answer."""
    (name, other), things = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    asked = f"{name} has {a} {things} and {other} has {b} {things}. How many {things} do they have together?"
    solved = (
        f"{name} has {a} {things}. {other} has {b} {things}. To find how many {things} they have together, add the two "
        f"numbers.\n{a} + {b} = {a + b}\nTogether {name} and {other} have {a + b} {things}. The answer is {a + b}."
    )
    return asked, solved, a + b


@cache
def examples() -> tuple[dict[str, str], ...]:
    """Turns of a chat in which such problems are solved, the same in every prompt."""
    rng, chat = random.Random("examples"), [{"role": "system", "content": SYSTEM}]
    for _ in range(EXAMPLES):
        asked, solved, _ = draw(rng)
        chat += [{"role": "user", "content": asked}, {"role": "assistant", "content": solved}]
    return tuple(chat)


def prompt_row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    """One prompt in verl's columns."""
    asked, answer = ask_many(rng) if index % EVERY == EVERY - 1 else draw(rng)[::2]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [*examples(), {"role": "user", "content": asked}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"index": index, "split": split},
    }


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """The reward, in the form of verl's `reward.custom_reward_function`: 1.0 if the last number is right, else 0.0."""
    return float(re.findall(r"\d+", solution_str)[-1:] == [ground_truth])
