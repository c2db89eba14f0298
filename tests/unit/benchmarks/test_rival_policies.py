"""The policies that live_table is compared with do what their sources describe."""

import pytest

from benchmarks.control.policies import BanditPolicy, EmaPolicy
from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.types import OFF, Step

ARMS = (0, 1, 3, 5, 7)


def reward(policy, batch, k, tokens_per_s, times=1):
    produced, drafts = batch * (1 + k), batch if k else 0
    step = Step(batch, 100 * batch, k, k, drafts, (batch,) * k, produced, produced / tokens_per_s, True)
    for _ in range(times):
        policy.observe(step)


@pytest.mark.parametrize("kind", [BanditPolicy, EmaPolicy])
def test_an_engine_takes_them_by_name(kind):
    policy = make_policy(f"benchmarks.control.policies:{kind.__name__}", ARMS, 8)
    assert isinstance(policy, kind)
    assert policy.choose(4) in ARMS
    policy.observe(Step(0, 0, 0, 3, 0, (0, 0, 0), 0, 0.5, clean=False))  # prompts alone
    policy.observe(Step(4, 400, OFF, 0, 0, (), 4, 0.1, clean=True))
    assert policy.choose(4) in ARMS


def test_the_bandit_tries_every_arm_of_a_bucket_then_the_best_median_wins():
    policy = BanditPolicy(ARMS, epsilon=0.0, hold=1, window=5)
    tried = []
    for speed in (100.0, 300.0, 200.0, 50.0, 10.0):
        tried.append(policy.choose(4))
        reward(policy, 4, tried[-1], speed)
    assert sorted(tried) == list(ARMS)
    reward(policy, 4, tried[4], 10.0, 2)
    reward(policy, 4, tried[4], 9000.0, 2)  # outliers do not move its median
    assert {policy.choose(4) for _ in range(20)} == {tried[1]}
    assert policy.choose(8) != tried[1], "another bucket has rewards of its own"


@pytest.mark.parametrize(("accepted", "k"), [(0.9, 3), (0.7, 1), (2.4, 3), (2.6, 7)])
def test_a_tier_is_left_by_its_margins(accepted, k):
    """K=3 drafts longer above 3 - 0.5 accepted tokens and shorter below 1 - 0.25."""
    policy = EmaPolicy((0, 1, 3, 7), weight=1.0, hold=1)
    policy.observe(Step(10, 10, 3, 3, 10, (round(10 * accepted), 0, 0), 10, 0.01, True))
    assert policy.choose(10) == k
