"""Word problems for a language model of 135M parameters: prompts, their solutions in words, and the reward.

    Mia has 6 shells, Ben has 9 and Ola has 12. How many shells do they have together?

    Mia has 6. With the 9 of Ben that makes 15. Adding 12 from Ola to 15 gives 27. The answer is 27.

A solution names each person once, in sentences whose form is drawn. One problem in `EVERY` is about many people: its
solution is several times as long, so that a batch of responses has a tail.
"""

import random
import re
from typing import Any

DATA_SOURCE = "word_problems"
NAMES = (
    *("Ava", "Ben", "Carla", "Dev", "Elif", "Femi", "Gus", "Hana", "Ivo", "Jun", "Kira", "Leo", "Mia", "Nils", "Ola"),
    *("Pia", "Quin", "Rosa", "Sam", "Tia", "Uma", "Vera", "Wim", "Xavi", "Yara", "Zoe", "Alma", "Bo", "Cora", "Dina"),
)
THINGS = ("apples", "pencils", "marbles", "stickers", "books", "coins", "cards", "shells", "cookies", "stamps")
SYSTEM = "You solve word problems."
EVERY, FEW, MANY = 8, (2, 5), (18, 24)
"""One problem in so many is about many people, the others are about few: from and to."""
NUMBERS = (2, 12)
FORMS = (
    "{name} has {number}: {before} + {number} = {after}.",
    "Then {name} brings {number}, so {before} + {number} is {after}.",
    "With the {number} of {name} that makes {after}.",
    "Adding {number} from {name} to {before} gives {after}.",
    "It is {after} after {name} adds {number} {things}.",
    "Next come the {number} {things} of {name}: {after} so far.",
)


def draw(rng: random.Random, many: bool) -> tuple[str, str, int]:
    """A problem, its solution and the answer."""
    names, things = rng.sample(NAMES, rng.randint(*(MANY if many else FEW))), rng.choice(THINGS)
    numbers = [rng.randint(*NUMBERS) for _ in names]
    first, *others, last = (f"{name} has {number}" for name, number in zip(names, numbers, strict=True))
    asked = ", ".join((f"{first} {things}", *others)) + f" and {last}. How many {things} do they have together?"
    solved, total = [f"{names[0]} has {numbers[0]}."], numbers[0]
    for name, number in zip(names[1:], numbers[1:], strict=True):
        before, total = total, total + number
        solved.append(rng.choice(FORMS).format(name=name, number=number, things=things, before=before, after=total))
    return asked, " ".join((*solved, f"The answer is {total}.")), total


def chat(asked: str) -> list[dict[str, str]]:
    """A prompt, as turns of a chat."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]


def prompt_row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    """One prompt in verl's columns."""
    asked, _, answer = draw(rng, many=index % EVERY == EVERY - 1)
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
