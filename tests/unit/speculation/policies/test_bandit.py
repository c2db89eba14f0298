"""BEG as the paper has it: buckets, medians, epsilon, forced first tries; and the released lookup table."""

import pytest

from verl_tlt.speculation.policies.bandit import BanditPolicy, BanditSettings
from verl_tlt.speculation.policies.factory import make_policy
from verl_tlt.speculation.types import ControlError, Load, StepRecord

ARMS = (0, 1, 3, 5, 7)
RELEASED = {"thresholds": (1, 2, 5, 21), "arms_per_bucket": 1, "off_arm": False, "off_above": 32}
"""Settings under which BEG is what TLT's released defaults are; needs exactly four draft lengths besides 0."""


def reward(policy, batch, k, tokens_per_s, times=1):
    produced, drafts = batch * (1 + k), batch if k else 0
    step = StepRecord(batch, 100 * batch, k, k, drafts, (batch,) * k, produced, produced / tokens_per_s, True)
    for _ in range(times):
        policy.observe(step)


def test_the_released_defaults_are_a_lookup_table():
    policy = make_policy("bandit", ARMS, settings=RELEASED)
    for k in ARMS:
        reward(policy, 4, k, 100.0 * (1 + k), 5)
    chosen = {b: {policy.choose(Load(b, b * 100)) for _ in range(30)} for b in (1, 2, 4, 5, 20, 21, 32, 33, 256)}
    assert chosen == {1: {7}, 2: {5}, 4: {5}, 5: {3}, 20: {3}, 21: {1}, 32: {1}, 33: {0}, 256: {0}}


def test_every_arm_of_a_bucket_is_tried_then_the_best_median_wins():
    policy = BanditPolicy(ARMS, BanditSettings(epsilon=0.0, hold=1))
    tried = []
    for speed in (100.0, 300.0, 200.0, 50.0, 10.0):
        k = policy.choose(Load(4, 400))
        tried.append(k)
        reward(policy, 4, k, speed)
    assert sorted(tried) == list(ARMS)
    assert {policy.choose(Load(4, 400)) for _ in range(20)} == {tried[1]}


def test_the_median_shrugs_off_outliers_and_the_window_forgets():
    policy = BanditPolicy((0, 1), BanditSettings(epsilon=0.0, hold=1, window=5))
    reward(policy, 4, 0, 100.0, 5)
    reward(policy, 4, 1, 90.0, 3)
    reward(policy, 4, 1, 9000.0, 2)
    assert policy.choose(Load(4, 400)) == 0
    reward(policy, 4, 1, 200.0, 3)
    assert policy.choose(Load(4, 400)) == 1


def test_buckets_do_not_share_rewards():
    policy = BanditPolicy((0, 1), BanditSettings(thresholds=(1, 8), epsilon=0.0, hold=1))
    for batch, best in ((4, 1), (16, 0)):
        reward(policy, batch, best, 200.0)
        reward(policy, batch, 1 - best, 100.0)
    assert policy.choose(Load(7, 700)) == 1
    assert policy.choose(Load(8, 800)) == 0


def test_epsilon_explores_its_share_and_the_seed_repeats_it():
    def choices(seed):
        policy = BanditPolicy(ARMS, BanditSettings(epsilon=0.1, hold=1), seed=seed)
        for k in ARMS:
            reward(policy, 4, k, 1000.0 if k == 3 else 10.0)
        return [policy.choose(Load(4, 400)) for _ in range(3000)]

    assert choices(7) == choices(7) != choices(8)
    assert 0.05 < sum(k != 3 for k in choices(7)) / 3000 < 0.11


def test_unclean_steps_earn_no_reward():
    policy = BanditPolicy((0, 1), BanditSettings(epsilon=0.0, hold=1))
    reward(policy, 4, 0, 100.0)
    reward(policy, 4, 1, 50.0)
    policy.observe(StepRecord(4, 400, 1, 1, 4, (4,), 8, 1e-6, clean=False))
    assert policy.choose(Load(4, 400)) == 0


@pytest.mark.parametrize(("width", "expected"), [(1, {1: {0, 7}, 200: {0, 1}}), (2, {1: {0, 5, 7}, 200: {0, 1, 3}})])
def test_groups_by_verify_count_long_ones_for_small_batches(width, expected):
    policy = BanditPolicy(ARMS, BanditSettings(thresholds=(1, 16, 64, 128), arms_per_bucket=width, epsilon=1.0, hold=1))
    for batch, arms in expected.items():
        assert {policy.choose(Load(batch, batch)) for _ in range(300)} == arms


def test_a_step_without_requests_earns_no_reward_and_no_drafting_at_all_is_a_setting():
    policy = BanditPolicy((0, 1, 3))
    policy.learn(StepRecord(0, 0, 1, 1, 0, (), 0, 0.01, True))
    BanditSettings(off_above=0).check((0, 1, 3))
    assert BanditPolicy((0, 1, 3), BanditSettings(off_above=0)).choose(Load(1, 1)) == 0
    with pytest.raises(ControlError, match="off_above must not be negative, not -1"):
        BanditSettings(off_above=-1).check((0, 1, 3))
