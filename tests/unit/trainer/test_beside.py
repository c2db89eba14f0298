"""What log-probs and update take more beside a merge."""

import pytest

from verl_tlt.trainer.beside import BesideMerge


def step(seconds, tokens, tap=0.0):
    return {
        "timing_s/old_log_prob": seconds / 3 + tap, "timing_s/update_actor": seconds * 2 / 3,
        "perf/total_num_tokens": tokens, "tlt/overhead_tap_s": tap,
    }  # fmt: skip


def test_a_merge_is_charged_what_the_phases_take_more_per_token():
    beside = BesideMerge()
    assert beside.observe(step(9.0, 100), merging=False) is None, "the first step compiles"
    assert beside.observe(step(3.0, 100), merging=True) is None, "nothing to compare with yet"
    assert beside.observe(step(2.0, 100, tap=0.5), merging=False) is None
    assert beside.observe(step(2.2, 100), merging=False) is None
    assert beside.observe(step(5.4, 200, tap=0.5), merging=True) == pytest.approx(5.4 - 2 * 2.2)
    assert beside.observe(step(2.2, 100), merging=True) == pytest.approx(0.0)


def test_steps_beside_a_merge_are_no_measure_of_those_without():
    beside = BesideMerge()
    for _ in range(2):
        beside.observe(step(2.0, 100), merging=False)
    for _ in range(30):
        assert beside.observe(step(3.0, 100), merging=True) == pytest.approx(1.0)


def test_what_verl_does_not_time_is_not_told():
    beside = BesideMerge()
    for _ in range(3):
        assert beside.observe({"timing_s/update_actor": 1.0}, merging=False) is None
    assert beside.observe(step(3.0, 100), merging=True) is None
