"""What an arm claims, beside what was measured."""

from dataclasses import replace

from benchmarks.e2e.claims import claims
from verl_tlt.commands.compare.record import Step


def step(turn, number, rollout_s, tokens=1000.0, **known):
    return Step(turn, number, rollout_s + 5.0, rollout_s, tokens, reward=0.5, **known)


def test_what_was_claimed_to_be_saved_is_compared_where_something_was_claimed():
    stock, arm = [step(0, n, 10.0) for n in range(3)], [step(0, n, 6.0) for n in range(3)]
    assert claims(stock, arm)["saved"] is None
    told = [arm[0], replace(arm[1], saved_s=5.0), replace(arm[2], saved_s=2.0)]
    found = claims(stock, told)["saved"]
    assert (found["claimed_s"], found["measured_s"]) == (7.0, 8.0)
    assert found["measured_low_s"] == found["measured_high_s"] == 8.0, "both steps were shorter by as much"
    assert (found["error_low_s"], found["error_high_s"]) == (-4.0, 2.0), "1 s too much, 2 s too little"


def test_rollouts_in_which_nothing_was_drafted_have_a_ratio_of_their_own():
    stock, arm = [step(0, n, 10.0) for n in range(4)], [step(0, n, 5.0) for n in range(3)]
    arm.append(step(0, 3, 20.0, tokens=1600.0, draft_length=0.0))
    assert claims(stock, arm[:3])["rollout_off"] is None
    assert claims(stock, [replace(arm[0], draft_length=0.2), *arm[1:]])["rollout_off"]["each"] == [0.8]
