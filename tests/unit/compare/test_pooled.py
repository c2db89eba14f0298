"""What a comparison concludes from the steps of its arms, and how it reads them."""

import random
from dataclasses import replace

import pytest

from verl_tlt.commands.compare.record import CompareError, Step, read_step
from verl_tlt.commands.compare.result import ratios, summary


def step(turn, number, rollout_s, rest_s=5.0, tokens=1000.0):
    return Step(turn, number, rollout_s + rest_s, rollout_s, tokens, tokens / 4, reward=0.5)


def race(seed):
    """Stock's steps and those of an arm that is 1.5 times as fast on a noisy machine."""
    rng = random.Random(seed)
    stock = [step(t, n, 20 * rng.uniform(0.5, 2)) for t in range(8) for n in range(3)]
    return stock, [step(s.turn, s.step, s.rollout_s / 1.5 * rng.uniform(0.8, 1.2)) for s in stock]


def test_a_ratio_is_of_sums():
    stock, arm = race(0)
    found = ratios(stock, arm)
    pooled = sum(s.rollout_s for s in stock) / sum(s.rollout_s for s in arm)
    assert found["rollout"]["pooled"] == pytest.approx(pooled, abs=1e-4) and len(found["rollout"]["each"]) == 24
    assert 1.0 < found["e2e"]["pooled"] < found["rollout"]["pooled"], "Amdahl"


def test_an_arm_that_had_twice_as_much_to_write_is_as_fast_per_token():
    stock = [step(0, n, 10.0) for n in range(4)]
    arm = [step(0, n, 20.0, tokens=2000.0) for n in (1, 2, 3, 4)]
    found = ratios(stock, arm)
    assert found["rollout"]["pooled"] == 0.5 and found["rollout_per_token"]["pooled"] == 1.0
    assert found["rollout"]["each"] == [0.5] * 3, "of the steps that both have"


def test_what_was_claimed_to_be_saved_is_compared_where_something_was_claimed():
    stock, arm = [step(0, n, 10.0) for n in range(3)], [step(0, n, 6.0) for n in range(3)]
    assert ratios(stock, arm)["saved"] is None
    told = [arm[0], replace(arm[1], saved_s=5.0), replace(arm[2], saved_s=2.0)]
    found = ratios(stock, told)["saved"]
    assert (found["claimed_s"], found["measured_s"]) == (7.0, 8.0)
    assert found["measured_low_s"] == found["measured_high_s"] == 8.0, "both steps were shorter by as much"
    assert (found["error_low_s"], found["error_high_s"]) == (-4.0, 2.0), "1 s too much, 2 s too little"


def test_what_an_arm_is_ahead_counts_all_seconds_up_to_a_step():
    """Its second step has a wait of 12 s in it; the third is of another turn, and its texts are twice as long."""
    stock = [step(turn, n, 10.0) for turn, n in ((0, 2), (0, 3), (1, 5), (1, 6))]
    arm = [step(0, 2, 9.0), step(0, 3, 22.0), step(1, 5, 14.0, tokens=2000.0), step(1, 6, 9.0)]
    found = ratios(stock, arm[::-1])["lead"]
    assert found == {"seconds": [(2, 1.0), (3, -11.0), (5, 0.0), (6, 1.0)], "from_step": 6}
    assert ratios(stock[:2], arm)["lead"]["from_step"] is None


def test_rollouts_in_which_nothing_was_drafted_have_a_ratio_of_their_own():
    stock, arm = [step(0, n, 10.0) for n in range(4)], [step(0, n, 5.0) for n in range(3)]
    arm.append(replace(step(0, 3, 20.0, tokens=1600.0), off_frac=1.0))
    assert ratios(stock, arm[:3])["rollout_off"] is None
    assert ratios(stock, [replace(arm[0], off_frac=0.9), *arm[1:]])["rollout_off"]["each"] == [0.8]


def test_the_checkpoint_of_a_turn_is_no_part_of_its_steps():
    metrics = {"timing_s/step": 9.0, "timing_s/gen": 4.0, "timing_s/save_checkpoint": 2.0, "timing_s/update_actor": 2.5,
               "response_length/mean": 10.0, "response_length/max": 30.0, "critic/score/mean": 0.25,
               "prompt_length/mean": 5.0, "perf/total_num_tokens": 360.0}  # fmt: skip
    found = read_step(2, 7, metrics)
    assert (found.step_s, found.tokens, found.accept_length, found.off_frac) == (7.0, 240.0, None, None)
    assert found.prompt == 5.0 and read_step(2, 7, metrics | {"tlt/spec_off_frac": 1.0}).off_frac == 1.0
    assert summary([found])["train_s"]["median"] == 3.0 and summary([found])["accept_length"] is None
    assert summary([found, found])["phases_s"]["update_actor"] == 2.5


def test_a_step_without_what_is_compared_is_refused_by_name():
    with pytest.raises(CompareError, match="no rollout_s and no tokens and no reward for step 7"):
        read_step(0, 7, {"timing_s/step": 9.0})
