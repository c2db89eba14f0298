"""What the end-to-end benchmark concludes from the steps of its arms, and how it reads them."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarks.e2e.__main__ import Record, calibrate, schedule
from benchmarks.e2e.arms import SPECULATIVE, STOCK, arms, speculative_config
from benchmarks.e2e.pooled import Step, pairs, ratio, ratios, read_step, summary
from benchmarks.e2e.turn import accepted
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable, TableKey, save_table


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


def test_nineteen_of_twenty_intervals_hold_the_truth():
    found = [ratio(pairs(*race(seed)), lambda s: s.rollout_s, lambda s: 1.0) for seed in range(40)]
    assert 33 <= sum(r["low"] < 1.5 < r["high"] for r in found) <= 39
    assert all(r["high"] - r["low"] < 0.3 for r in found)


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


def test_rollouts_in_which_nothing_was_drafted_have_a_ratio_of_their_own():
    stock, arm = [step(0, n, 10.0) for n in range(4)], [step(0, n, 5.0) for n in range(3)]
    arm.append(replace(step(0, 3, 20.0, tokens=1600.0), off_frac=1.0))
    assert ratios(stock, arm[:3])["rollout_off"] is None
    assert ratios(stock, [replace(arm[0], off_frac=0.9), *arm[1:]])["rollout_off"]["each"] == [0.8]


def test_the_checkpoint_of_a_turn_is_no_part_of_its_steps():
    metrics = {"timing_s/step": 9.0, "timing_s/gen": 4.0, "timing_s/save_checkpoint": 2.0, "timing_s/update_actor": 2.5,
               "response_length/mean": 10.0, "response_length/max": 30.0, "critic/score/mean": 0.25}  # fmt: skip
    found = read_step(2, 7, metrics, responses=24)
    assert (found.step_s, found.tokens, found.accept_length, found.off_frac) == (7.0, 240.0, None, None)
    assert read_step(2, 7, metrics | {"tlt/spec_off_frac": 1.0}, responses=24).off_frac == 1.0
    assert summary([found])["train_s"]["median"] == 3.0 and summary([found])["accept_length"] is None
    assert summary([found, found])["phases_s"]["update_actor"] == 2.5


def test_what_vllm_logs_of_accept_lengths_is_weighed_by_drafts():
    line = "INFO SpecDecoding metrics: Mean acceptance length: {}, Accepted throughput: 1.00 tokens/s, Drafted throughput: 2.00 tokens/s, Accepted: {} tokens, Drafted: 300 tokens, Per"  # noqa: E501
    assert accepted([line.format("3.00", 200), "another line", line.format("1.50", 150)]) == 1 + 350 / 400
    assert accepted([line.format("1.00", 0)]) is None


def test_what_was_calibrated_stays_whatever_the_arms_learn(tmp_path):
    calibrated = tmp_path / "calibrated"
    calibrated.mkdir()
    (calibrated / "warm.json").write_text("measured")
    for _ in range(2):
        found, costs = calibrate(tmp_path, None, None)
        (costs / "warm.json").write_text("learned")
        (costs / "fresh.json").write_text("learned")
    assert [path.read_text() for path in found.iterdir()] == ["measured"]
    assert sorted(path.read_text() for path in costs.iterdir()) == ["learned", "learned"]


def test_every_arm_is_stock_or_says_what_it_changes(tmp_path):
    every = arms(Path("/d"), [[1, 4, 5], [5, 32, 0]], tmp_path)
    assert len(every) == 9 and next(iter(every)) == STOCK and not every[STOCK].overrides
    parsed = OverridesParser.create().parse_overrides([o for arm in every.values() for o in arm.overrides])
    of_vllm = [o.value() for o in parsed if o.key_or_group in SPECULATIVE]
    assert [config["num_speculative_tokens"] for config in of_vllm] == [1, 3, 7, 7]
    assert of_vllm[-1]["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 32, 0]]
    assert of_vllm[0] == OverridesParser.create().parse_override(speculative_config(Path("/d"), 1)).value()
    assert not any(arm.tlt for arm in every.values() if SPECULATIVE in "".join(arm.overrides))


def test_vllms_table_drafts_less_where_batches_are_large(tmp_path):
    seconds = {-1: 0.010, 0: 0.011, 3: 0.013, 7: 0.016}
    points = [
        LatencyPoint(batch, 100 * batch, k, s * (1 + batch * (k + 1) / 60), calibrated=True)
        for k, s in seconds.items()
        for batch in (1, 4, 16, 32)
    ]
    save_table(tmp_path, TableKey("cpu", "toy", "0"), LatencyTable(tuple(points)))
    table = schedule(tmp_path, [0.8] * 7)
    assert table[0][0] == 1 and table[-1][1] == 32 and table[0][2] > table[-1][2]


def test_a_benchmark_that_is_called_again_goes_on(tmp_path):
    first = Record(tmp_path)
    first.add({"arm": "tlt", "turn": 0, "steps": [vars(step(0, 2, 9.0))], "accept_length": 2.0, "seconds": 1.0})
    again = Record(tmp_path)
    assert again.done("tlt", 0) and not again.done("tlt", 1) and not again.done(STOCK, 0)
    assert again.steps("tlt") == [step(0, 2, 9.0)] and again.accept_length("tlt") == 2.0
