"""What is concluded from the steps of a comparison: ratios with intervals, sentences, the rows of the table."""

import math
import random
from dataclasses import replace

import pytest

from verl_tlt.commands.compare.plan import named_arms
from verl_tlt.commands.compare.record import CompareError, Record, Step, Turn, read_step, schedule
from verl_tlt.commands.compare.result import (
    arm_rows,
    found_of,
    left_out,
    other_prompts,
    paid_back,
    pairs,
    ratio,
    ratios,
    undrafted,
    verdict,
)

TRUE = 1.5
ARMS = named_arms(["tlt", "vllm-3", "vllm-7"], "/a/drafter")
FASTER = {"stock": 1.0, "tlt": 1.6, "vllm-3": 1.3, "vllm-7": 1.5}


def step(turn, number, rollout_s, tokens=1000.0, **known):
    return Step(turn, number, rollout_s + 5.0, rollout_s, tokens, **{"reward": 0.5, "prompt": 20.0} | known)


def noisy(rng, faster, count, noise):
    """Seconds of so many rollouts of stock and of an arm, on a machine whose pace changes."""
    paces = [20 * rng.uniform(1 - noise, 1 + noise) for _ in range(count)]
    return [(pace, pace / faster * rng.uniform(0.8, 1.2)) for pace in paces]


def test_a_ratio_is_of_sums():
    seconds = noisy(random.Random(0), TRUE, 24, 0.6)
    stock, arm = ([step(i // 3, i % 3, pair[place]) for i, pair in enumerate(seconds)] for place in (0, 1))
    found = ratios(stock, arm)
    sums = [sum(column) for column in zip(*seconds, strict=True)]
    rollout, whole = found["rollout_per_token"], found["e2e_per_token"]
    assert rollout["pooled"] == pytest.approx(sums[0] / sums[1], abs=1e-4)
    assert len(rollout["each"]) == 24 and 1.0 < whole["pooled"] < rollout["pooled"], "Amdahl"


def test_an_arm_that_had_twice_as_much_to_write_is_as_fast_per_token():
    stock = [step(0, n, 10.0) for n in range(4)]
    arm = [step(0, n, 20.0, tokens=2000.0) for n in (1, 2, 3, 4)]
    found = ratios(stock, arm)["rollout_per_token"]
    assert found["pooled"] == 1.0 and found["each"] == [1.0] * 3, "of the steps that both have"


def test_what_an_arm_is_ahead_counts_all_seconds_up_to_a_step():
    """Its second step has a wait of 12 s in it; the third is of another turn, and its texts are twice as long."""
    stock = [step(turn, n, 10.0) for turn, n in ((0, 2), (0, 3), (1, 5), (1, 6))]
    arm = [step(0, 2, 9.0), step(0, 3, 22.0), step(1, 5, 14.0, tokens=2000.0), step(1, 6, 9.0)]
    found = ratios(stock, arm[::-1])["lead"]
    assert found == {"seconds": [(2, 1.0), (3, -11.0), (5, 0.0), (6, 1.0)], "from_step": 6}
    assert ratios(stock[:2], arm)["lead"]["from_step"] is None


def test_the_checkpoint_of_a_turn_is_no_part_of_its_steps():
    metrics = {"timing_s/step": 9.0, "timing_s/gen": 4.0, "timing_s/save_checkpoint": 2.0,
               "response_length/mean": 10.0, "response_length/max": 30.0, "critic/score/mean": 0.25,
               "prompt_length/mean": 5.0, "perf/total_num_tokens": 360.0}  # fmt: skip
    found = read_step(2, 7, metrics)
    assert (found.step_s, found.tokens, found.accept_length, found.draft_length) == (7.0, 240.0, None, None)
    assert found.prompt == 5.0 and read_step(2, 7, metrics | {"tlt/draft_length_mean": 0.0}).draft_length == 0.0
    assert read_step(2, 7, {name: value for name, value in metrics.items() if "score" not in name}).reward is None
    with pytest.raises(CompareError, match="no rollout_s and no tokens for step 7"):
        read_step(0, 7, {"timing_s/step": 9.0})


def measured(faster, turns, seed=0):
    """The ratio of an arm so many times as fast as stock, five steps a turn."""
    seconds = noisy(random.Random(seed), faster, 5 * turns, 0.2)
    both = [(step(i // 5, i, a), step(i // 5, i, b)) for i, (a, b) in enumerate(seconds)]
    return ratio(both, lambda s: s.rollout_s)


def test_the_verdict_is_faster_slower_no_difference_or_too_few_steps():
    assert verdict("tlt", "stock", measured(1.5, 4), 4).startswith("tlt was faster than stock: 1.")
    assert verdict("tlt", "stock", measured(0.6, 4), 4).startswith("tlt was slower than stock: 0.")
    few = measured(1.03, 3)
    said = verdict("tlt", "stock", few, 3)
    assert "No measurable difference" in said and f"{few['low']:.2f} to {few['high']:.2f}" in said
    assert sum(r["low"] > 1 or r["high"] < 1 for r in (measured(1.0, 3, seed=s) for s in range(20))) <= 3
    two = measured(1.5, 2)
    assert verdict("tlt", "stock", two, 2).startswith("Too few jobs to tell: 2 of each arm, 3 are needed")
    assert two["low"] is None and two["high"] is None
    far_apart = {"pooled": 3.0, "low": 2.9, "high": 3.1, "each": [3.0] * 4}
    assert verdict("tlt", "stock", far_apart, 3).startswith("Too few steps to tell: 4 of each arm count, 5 are needed")


@pytest.mark.parametrize("turns", [3, 6])
def test_the_interval_holds_the_truth_where_jobs_differ_more_than_their_steps(turns):
    """Steps alone would show a difference between equal arms in every third comparison."""

    def compared(seed):
        rng = random.Random(seed)
        of_arm = {arm: [rng.gauss(0.0, 0.05) for _ in range(turns)] for arm in ("stock", "arm")}
        rows = {arm: [step(turn, n, 10.0 * math.exp(pace + rng.gauss(0.0, 0.05))) for turn, pace in enumerate(paces)
                      for n in range(5 * turn, 5 * turn + 5)] for arm, paces in of_arm.items()}  # fmt: skip
        return ratios(rows["stock"], rows["arm"])["e2e_per_token"]

    wrong = sum(not found["low"] < 1.0 < found["high"] for found in map(compared, range(100)))
    assert wrong <= 11  # 5 of 100 are expected


def test_an_arm_that_was_behind_says_since_when_it_no_longer_is():
    rows = [(2, -0.5), (3, -21.6), (4, -3.0), (5, 8.2)]
    said = paid_back("tlt", "stock", {"seconds": rows, "from_step": 5})
    assert "22 s behind stock after step 3; since step 5 it is ahead (+8 s after step 5" in said
    assert "not ahead yet (-3 s after step 4" in paid_back("tlt", "stock", {"seconds": rows[:3], "from_step": None})
    assert not paid_back("tlt", "stock", {"seconds": rows[3:], "from_step": 5})


def test_steps_in_which_tlt_drafted_nothing_are_told():
    steps = [replace(step(0, n, 10.0), draft_length=k) for n, k in enumerate((0.0, 0.0, 2.0, None))]
    assert undrafted("tlt", steps) == "In 2 of 4 steps tlt drafted nothing." and undrafted("tlt", steps[2:]) == ""


def test_what_is_left_out_are_means_over_turns():
    turns = [Turn("stock", 0, [step(0, 2, 5.0)], 50.0, 12.0, 3.0), Turn("stock", 1, [], 30.0, 8.0, 1.0)]
    assert left_out(turns) == {"start_s": 23.0, "first_step_s": 10.0, "checkpoint_s": 2.0}


def test_steps_with_other_prompts_are_counted():
    stock = [step(0, 2, 10.0), step(0, 3, 10.0, prompt=31.0)]
    assert other_prompts(stock, stock) == 0
    assert other_prompts(stock, [step(0, 2, 9.0), step(0, 3, 9.0)]) == 1


@pytest.fixture
def record(tmp_path):
    """Four rounds of four arms, the last one not to its end."""
    found, rng = Record(tmp_path, {}), random.Random(0)
    for name, turn in list(schedule(list(FASTER), 4))[:-1]:
        steps = [
            step(turn, 5 * turn + 2 + i, 10.0 / FASTER[name] * rng.uniform(0.95, 1.05), 1000.0 + i,
                 reward=0.5 + rng.uniform(-0.1, 0.1), accept_length=2.0 + i if name == "tlt" else None)
            for i in range(4)
        ]  # fmt: skip
        found.add(Turn(name, turn, steps, 120.0, 16.0, 4.0, 3.5 if name.startswith("vllm") else None))
    return found


def test_every_arm_has_its_ratio_length_reward_and_sentence(record):
    found = found_of(ARMS, record)
    assert list(found["arms"]) == list(FASTER) and next(iter(found["ratios"])) == "tlt"
    for name, of in found["ratios"].items():
        assert of["rollout_per_token"]["pooled"] == pytest.approx(FASTER[name], rel=0.05)
        assert 1 < of["e2e_per_token"]["pooled"] < of["rollout_per_token"]["pooled"]
    assert [found["arms"][name]["accept_length"] for name in ("stock", "tlt", "vllm-3")] == [None, 3.5, 3.5]
    assert found["sentences"][0].startswith("tlt was faster than stock"), "the answer comes first"
    assert "vllm-7, the fastest of the others" in " ".join(found["sentences"])
    assert len(found["turns"]) == len(record.turns) == 15
    record.turns[0].steps[0] = replace(record.turns[0].steps[0], reward=None)
    assert all(row[-2].startswith("0.") for row in arm_rows(found_of(ARMS, record)))


def test_a_step_in_which_nothing_was_written_is_not_compared(record):
    before = found_of(ARMS, record)
    record.turns[0].steps.append(step(0, 99, 10.0, tokens=0.0))
    record.turns[1].steps.append(step(0, 99, 10.0, tokens=0.0))
    found = found_of(ARMS, record)
    assert found["ratios"] == before["ratios"] and found["sentences"] == before["sentences"]


@pytest.mark.parametrize(("turns", "told"), [(2, False), (3, True)])
def test_few_jobs_of_each_arm_tell_neither_an_interval_nor_since_when_it_is_ahead(tmp_path, turns, told):
    record = Record(tmp_path, {})
    for turn in range(turns):
        for name, seconds in (("stock", [10.0] * 6), ("tlt", [20.0, *[5.0] * 5])):
            steps = [step(turn, 10 * turn + i, s) for i, s in enumerate(seconds)]
            record.add(Turn(name, turn, steps, 120.0, 16.0, 4.0))
    found = found_of(ARMS, record)
    assert any("it is ahead" in sentence for sentence in found["sentences"]) == told
    assert ("to" in arm_rows(found)[1][1].split()) == told


def test_before_the_first_pair_there_is_nothing_to_say(tmp_path):
    found = found_of(ARMS, Record(tmp_path, {}))
    assert not found["ratios"] and not found["arms"] and not found["sentences"] and pairs([], []) == []


def test_every_arm_has_a_row_with_its_largest_probability_difference(record):
    for place, difference in enumerate((1e-6, 3e-6)):
        record.turns[1].steps[place] = replace(record.turns[1].steps[place], probs_diff_max=difference)
    rows = arm_rows(found_of(ARMS, record))
    assert [row[0] for row in rows] == list(FASTER) and {len(row) for row in rows} == {6}
    assert [row[-1] for row in rows] == ["-", "3.0e-06", "-", "-"] and rows[1][2].startswith("1.")
