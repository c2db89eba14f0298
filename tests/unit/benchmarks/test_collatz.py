"""Collatz chains as a task: their solutions, their reward, and two sides of prompts that share no step."""

import random
import re
from typing import get_args

import pytest

from benchmarks.real_policy import collatz
from benchmarks.real_policy.collatz import CHAINS, EVERY, FEW, LIMIT, MANY, Side, chain, compute_score, draw, prompt_row


@pytest.mark.parametrize("side", get_args(Side))
@pytest.mark.parametrize(("many", "steps"), [(False, FEW), (True, MANY)])
def test_a_solution_says_every_number_and_count_by_turns_and_is_rewarded(side, many, steps):
    rng = random.Random(1)
    for _ in range(40):
        asked, solved, answer = draw(rng, many, side)
        numbers = chain(next(int(n) for n in re.findall(r"\d+", asked) if int(n) != LIMIT))
        assert len(numbers) - 1 == answer and steps[0] <= answer <= steps[1]
        assert numbers[-1] < LIMIT <= min(numbers[:-1])
        found = [
            int(n) for n in re.findall(r"\d+", re.sub("(?i)(plus|times) [13]", "", solved).replace("Below 100", ""))
        ]
        said = [{found[2 * i], found[2 * i + 1]} for i in range(answer)]
        assert said == [{i, number} for i, number in enumerate(numbers[1:], start=1)]
        assert compute_score(collatz.DATA_SOURCE, solved, str(answer)) == 1.0
        assert compute_score(collatz.DATA_SOURCE, solved, str(answer + 1)) == 0.0
    assert compute_score(collatz.DATA_SOURCE, "I do not know.", "7") == 0.0


def test_prompts_of_the_warm_up_share_no_step_with_those_of_a_run():
    steps = {
        side: {n for many in CHAINS for of in CHAINS[many][side].values() for start in of for n in chain(start)[:-1]}
        for side in get_args(Side)
    }
    assert len(steps["warm-up"]) > 500 and len(steps["run"]) > 500
    assert not steps["warm-up"] & steps["run"]


def test_one_prompt_in_eight_is_about_a_long_chain():
    rng = random.Random(0)
    rows = [prompt_row(rng, "train", i) for i in range(8 * EVERY)]
    answers = [int(row["reward_model"]["ground_truth"]) for row in rows]
    assert [answer >= MANY[0] for answer in answers] == ([False] * (EVERY - 1) + [True]) * 8
    assert len({row["prompt"][-1]["content"] for row in rows}) > 0.9 * len(rows)
