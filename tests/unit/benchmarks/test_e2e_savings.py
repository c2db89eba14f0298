"""Seconds that an arm claims to have saved, beside those that were measured."""

from dataclasses import replace

from benchmarks.e2e.savings import saved
from verl_tlt.commands.compare.record import Step


def step(number, rollout_s):
    return Step(0, number, rollout_s + 5.0, rollout_s, tokens=1000.0, reward=0.5)


def test_what_was_claimed_to_be_saved_is_compared_where_something_was_claimed():
    stock, arm = [step(n, 10.0) for n in range(3)], [step(n, 6.0) for n in range(3)]
    assert saved(stock, arm) is None
    found = saved(stock, [arm[0], replace(arm[1], saved_s=5.0), replace(arm[2], saved_s=2.0)])
    assert (found["claimed_s"], found["measured_s"]) == (7.0, 8.0)
    assert found["measured_low_s"] == found["measured_high_s"] == 8.0, "both steps were shorter by as much"
    assert (found["error_low_s"], found["error_high_s"]) == (-4.0, 2.0), "1 s too much, 2 s too little"
