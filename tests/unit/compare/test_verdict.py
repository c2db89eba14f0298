"""The sentences of a comparison: faster, slower, no difference seen, too few steps."""

import random
import re

import pytest

from verl_tlt.commands.compare.record import Step, Turn
from verl_tlt.commands.compare.result import left_out, other_prompts, paid_back, pairs, ratio, rounds_to_tell, verdict


def step(turn, number, step_s, prompt=20.0):
    return Step(turn, number, step_s, step_s / 2, 1000.0, 300.0, reward=0.5, prompt=prompt)


def measured(faster, rounds, noise=0.2, seed=0):
    """The ratio of an arm so many times as fast as stock, five steps a round."""
    rng = random.Random(seed)
    stock = [step(t, n, 10 * rng.uniform(1 - noise, 1 + noise)) for t in range(rounds) for n in range(5)]
    arm = [step(s.turn, s.step, 10 / faster * rng.uniform(1 - noise, 1 + noise)) for s in stock]
    return ratio(pairs(stock, arm), lambda s: s.step_s, lambda s: s.tokens)


def test_an_arm_whose_interval_is_on_one_side_of_1_was_faster_or_slower():
    assert verdict("tlt", "stock", measured(1.5, 4), 4).startswith("tlt was faster than stock: 1.5")
    assert verdict("tlt", "stock", measured(0.6, 4), 4).startswith("tlt was slower than stock: 0.6")


def test_an_arm_that_was_behind_says_since_when_it_no_longer_is():
    rows = [(2, -0.5), (3, -21.6), (4, -3.0), (5, 8.2)]
    said = paid_back("tlt", "stock", {"seconds": rows, "from_step": 5})
    assert "22 s behind stock after step 3" in said and "ahead from step 5 on: +8 s after step 5" in said
    assert "not ahead yet: -3 s after step 4" in paid_back("tlt", "stock", {"seconds": rows[:3], "from_step": None})
    assert not paid_back("tlt", "stock", {"seconds": rows[3:], "from_step": 5})


def test_no_difference_says_how_many_rounds_would_tell_and_those_tell():
    few = measured(1.08, 2, seed=1)
    said = verdict("tlt", "stock", few, 2)
    assert "No difference seen" in said and f"{few['low']:.2f} to {few['high']:.2f}" in said
    more = int(re.search(r"about (\d+) rounds? more", said)[1])
    assert more == rounds_to_tell(few, 2) > 1
    enough = [measured(few["pooled"], 2 + more, seed=seed) for seed in range(20)]
    assert sum(r["low"] > 1 or r["high"] < 1 for r in enough) >= 8, "about half of the time, at the edge"
    assert sum(r["low"] > 1 or r["high"] < 1 for r in (measured(1.0, 2, seed=s) for s in range(20))) <= 3


def test_equal_arms_are_not_promised_a_verdict():
    equal = {"pooled": 1.0, "low": 0.98, "high": 1.02, "each": [1.0] * 9}
    assert "hardly tell" in verdict("tlt", "stock", equal, 3)
    assert "hardly tell" in verdict("tlt", "stock", {**equal, "pooled": 1.0001}, 3)


@pytest.mark.parametrize(("steps", "rounds", "more"), [(1, 1, "4 rounds"), (3, 1, "1 round "), (4, 2, "1 round ")])
def test_few_steps_tell_nothing_however_far_apart(steps, rounds, more):
    far = {"pooled": 3.0, "low": 2.9, "high": 3.1, "each": [3.0] * steps}
    said = verdict("tlt", "stock", far, rounds)
    assert said.startswith("Too few steps") and more in said


def test_what_is_left_out_is_told_per_turn_and_beside_stock():
    turns = {
        "stock": [Turn("stock", 0, [step(0, 2, 10.0)], 50.0, 12.0, 3.0), Turn("stock", 1, [], 30.0, 8.0, 1.0)],
        "tlt": [Turn("tlt", 0, [step(0, 2, 5.0)], 60.0, 20.0, 3.0)],
    }
    stock, tlt = left_out(turns, "stock")
    assert "23 s a turn" in stock and "10 s for its first step" in stock and "2 s for the checkpoint" in stock
    assert "32 s a turn" in tlt and "19 s more than stock's" in tlt


def test_steps_with_other_prompts_are_counted():
    stock = [step(0, 2, 10.0), step(0, 3, 10.0, prompt=31.0)]
    assert other_prompts(stock, stock) == 0
    assert other_prompts(stock, [step(0, 2, 9.0), step(0, 3, 9.0)]) == 1
