"""The real policy's prompts and reward, and what of it can be checked without the model."""

import random
import re
from pathlib import Path

import pytest

from benchmarks.e2e.__main__ import REAL_ARMS
from benchmarks.e2e.arms import Heads, arms
from benchmarks.real_policy import policy, problems


def test_a_right_solution_is_rewarded_and_a_wrong_or_missing_one_is_not():
    rng = random.Random(0)
    for _ in range(50):
        _, solved, answer = problems.draw(rng)
        assert problems.compute_score(problems.DATA_SOURCE, solved, str(answer)) == 1.0
        assert problems.compute_score(problems.DATA_SOURCE, solved, str(answer + 1)) == 0.0
    assert problems.compute_score(problems.DATA_SOURCE, "I do not know.", "7") == 0.0


def test_a_prompt_shows_solved_problems_and_ends_with_another():
    rows = [problems.prompt_row(random.Random(seed), "train", seed) for seed in range(20)]
    for row in rows:
        roles = [turn["role"] for turn in row["prompt"]]
        assert roles == ["system", *["user", "assistant"] * problems.EXAMPLES, "user"]
        assert row["prompt"][-1] not in row["prompt"][:-1]
    assert len({row["prompt"][-1]["content"] for row in rows}) == len(rows)


def test_one_prompt_in_twelve_asks_for_the_sum_of_many():
    rows = [problems.prompt_row(random.Random(seed), "train", seed) for seed in range(4 * problems.EVERY)]
    numbers = [[int(n) for n in re.findall(r" has (\d+)", row["prompt"][-1]["content"])] for row in rows]
    assert [len(of) > 2 for of in numbers] == ([False] * (problems.EVERY - 1) + [True]) * 4
    assert all(row["reward_model"]["ground_truth"] == str(sum(of)) for row, of in zip(rows, numbers, strict=True))


def test_another_file_of_that_name_is_refused(tmp_path):
    (tmp_path / policy.WHEEL).write_bytes(b"another wheel")
    with pytest.raises(ValueError, match=f"SHA-256 .* not {policy.SHA256}"):
        policy._wheel(tmp_path)


def test_its_arms_are_among_those_of_the_comparison():
    heads = Heads(*[Path("/head")] * 3)
    assert set(REAL_ARMS) < arms(heads, [], Path("/costs"), longest=5).keys()
