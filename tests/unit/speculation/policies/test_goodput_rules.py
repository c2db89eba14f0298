"""What a change of K costs and when it is worth it, in numbers that can be worked out by hand."""

import pytest

from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.policies.goodput import GoodputPolicy, GoodputSettings
from verl_tlt.speculation.types import OFF, StepRecord

ARMS = (0, 1, 3)
COST = {0: 0.010, 1: 0.012, 3: 0.020}


@pytest.fixture
def policy():
    made = GoodputPolicy(ARMS, GoodputSettings(switch_price=0.5, on_gain=0.125, off_gain=0.0625))
    points = [LatencyPoint(b, b * 1000, k, COST[k], calibrated=True) for b in (4, 8, 16) for k in ARMS]
    made.set_latency(LatencyTable(tuple(points)))
    return made


def change(policy, seconds, verified=0, drafted=3, batch=8, clean=False):
    """A step in which K changed from `verified` to `drafted`."""
    tokens = (1,) * verified
    policy.observe(StepRecord(batch, 8000, drafted, verified, 8 * bool(verified), tokens, 8, seconds, clean=clean))
    return policy.summary()["switch_surcharge_steps"]


def half(policy, verified, drafted):
    cost = dict(zip(ARMS, policy.latency.predict(8, 8000)[1:], strict=True))
    return 0.5 * (cost[verified] + cost[drafted])


def test_a_change_costs_what_its_step_took_beyond_half_of_each_kind(policy):
    for verified, drafted in ((0, 3), (3, 0), (1, 3)):
        policy._surcharges.clear()
        assert half(policy, verified, drafted) == pytest.approx(0.5 * (COST[verified] + COST[drafted]), rel=0.02)
        paid = change(policy, 1.25 * half(policy, verified, drafted), verified, drafted)
        assert paid == pytest.approx(0.25, abs=0.01)


def test_the_lower_quartile_of_the_latest_fifteen_counts(policy):
    usual = half(policy, 0, 3)
    seen = [change(policy, usual * (1 + x)) for x in (0.4, 0.1, 0.3, 0.2)]
    assert seen == pytest.approx([0.4, 0.1, 0.1, 0.2], abs=1e-6)
    for _ in range(12):
        last = change(policy, usual * 1.5)
    assert last == pytest.approx(0.5, abs=1e-6), "of 0.1, 0.2, 0.3 and twelve times 0.5 it is the fourth"


def test_a_change_is_never_believed_to_cost_less_than_nothing_or_more_than_a_step(policy):
    usual = half(policy, 0, 3)
    assert change(policy, 9 * usual) == 1.0
    policy._surcharges.clear()
    assert change(policy, 0.5 * usual) == 0.0


def test_only_changes_between_arms_teach_their_cost(policy):
    for kind in ({"verified": 3, "drafted": 3}, {"drafted": OFF}, {"batch": 0}, {"drafted": 2}, {"clean": True}):
        assert change(policy, 1.0, **kind) == 0.0, kind


@pytest.mark.parametrize(
    ("now", "best", "lead", "surcharge", "looks"),
    [
        (1, 2, 0.25, 0.0, 2),  # the price of 0.5, reached exactly
        (1, 2, 0.25, 0.25, 3),  # what a change was seen to cost is added
        (0, 1, 0.375, 0.0, 2),  # drafting starts: less what it must promise
        (0, 1, 0.125, 0.0, None),  # no more than that: never
        (2, 0, 0.1875, 0.0, 2),  # drafting stops: more eagerly
    ],
)
def test_k_changes_once_staying_has_lost_as_much_as_a_change_costs(policy, now, best, lead, surcharge, looks):
    goodput = [1.0, 1.0, 1.0]
    goodput[best] = 1.0 + lead
    policy._current, policy._surcharge = now, surcharge
    for look in range(1, 9):
        policy._move(goodput, best, 8)
        assert (policy._current == best) == (looks is not None and look >= looks), look
    assert policy.summary()["switches"] == (looks is not None)


def test_a_lead_that_was_lost_is_forgotten(policy):
    policy._current = 1
    policy._move([1.0, 1.0, 1.25], 2, 8)
    policy._move([1.0, 1.0, 1.0], 2, 8)
    policy._move([1.0, 1.0, 1.25], 2, 8)
    assert policy._current == 1


def test_a_new_k_is_kept_for_as_many_steps_as_it_is_to_be_held(policy):
    policy._current, policy._regret = 1, 0.5
    policy._move([1.0, 1.0, 1.25], 2, 8)
    assert (policy._current, policy._held, policy._regret) == (2, policy._set.hold - 1, 0.0)
