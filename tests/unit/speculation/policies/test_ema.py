"""EMA with hysteresis: tiers follow acceptance, apart by range of batch sizes, from the arms there are."""

import pytest

from verl_tlt.speculation.policies.ema import EmaPolicy, EmaSettings
from verl_tlt.speculation.types import ControlError, Load, StepRecord


def drive(policy, batch, share, steps=60):
    """`share` of every position accepted."""
    k = policy.choose(Load(batch, batch))
    for _ in range(steps):
        accepted = tuple(round(batch * share ** (i + 1)) for i in range(k))
        produced = batch + sum(accepted)
        policy.observe(StepRecord(batch, batch, k, k, batch, accepted, produced, 0.01, True))
        k = policy.choose(Load(batch, batch))
    return k


def test_it_drafts_longer_while_everything_is_accepted():
    assert drive(EmaPolicy((0, 1, 3, 7)), 32, 1.0) == 7


def test_it_drafts_shorter_when_little_is_accepted_but_never_stops():
    assert drive(EmaPolicy((0, 1, 3, 7)), 32, 0.05) == 1


def test_ranges_of_batch_sizes_are_apart():
    policy = EmaPolicy((0, 1, 2, 3, 5, 7))
    assert drive(policy, 32, 1.0) == 7
    assert policy.choose(Load(100, 100)) == 2


def test_missing_arms_are_replaced_by_the_nearest():
    policy = EmaPolicy((0, 2), EmaSettings())
    assert policy.choose(Load(1, 1)) == 2


@pytest.mark.parametrize(
    ("weight", "hold", "fits"), [(1.0, 1, True), (0.0, 1, False), (1.01, 1, False), (0.5, 0, False)]
)
def test_settings_that_say_nothing_are_refused(weight, hold, fits):
    settings = EmaSettings(weight=weight, hold=hold)
    if fits:
        settings.check()
    else:
        with pytest.raises(ControlError, match="EMA settings need weight"):
            settings.check()


@pytest.mark.parametrize(
    ("thresholds", "tiers", "said"),
    [
        ((), (), "threshold"),
        ((2, 8), ((1,), (2,)), "threshold"),
        ((1, 8, 4), ((1,), (2,), (3,)), "threshold"),
        ((1, 1), ((1,), (2,)), "threshold"),
        ((1, 8), ((1,),), "threshold"),
        ((1,), ((),), "tiers"),
        ((1,), ((3, 1),), "tiers"),
    ],
)
def test_ranges_that_contradict_each_other_are_refused(thresholds, tiers, said):
    with pytest.raises(ControlError, match=said):
        EmaSettings(thresholds=thresholds, tiers=tiers).check()


@pytest.mark.parametrize(("accepted", "k"), [(0.9, 3), (0.7, 1), (2.4, 3), (2.6, 7)])
def test_a_tier_is_left_by_its_margins(accepted, k):
    """K=3 drafts longer above 3 - 0.5 accepted tokens and shorter below 1 - 0.25."""
    policy = EmaPolicy((0, 1, 3, 7), EmaSettings(weight=1.0, hold=1))
    policy.observe(StepRecord(10, 10, 3, 3, 10, (round(10 * accepted), 0, 0), 10, 0.01, True))
    assert policy.choose(Load(10, 10)) == k
