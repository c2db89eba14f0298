"""What drafting saved, in runs whose truth is known: the same requests decoded without a drafter, on one machine."""

import random
from itertools import pairwise

import pytest

from verl_tlt.messages.rollout import EngineStats, LoadInterval
from verl_tlt.speculation.baseline import Baseline
from verl_tlt.speculation.costs.tables import stock_points
from verl_tlt.speculation.draft_length import Limits, Profitability
from verl_tlt.speculation.policies.base import FixedPolicy
from verl_tlt.speculation.step_control import StepControl
from verl_tlt.speculation.step_statistics import MAX_INTERVALS
from verl_tlt.speculation.types import OFF, Load, StepRecord

K = 3
SLOWED = {1: 1.0, 2: 1.8}
"""How much longer a step takes by busy replicas, on a machine that they share."""
SLOWED_BY_TRAINING = 1.3
"""And beside a replica that trains."""
EASED_BY_DRAFTS = 0.8
"""What is left of a step beside a replica that drafts, of one beside a replica that does not."""


def step_s(batch, arm, busy, shared=True, context=0.0):
    """Seconds: weights, requests and their context, the drafter's pass and what it drafted."""
    alone = (
        0.010 + 0.0004 * batch + 2e-7 * context + (0.0 if arm == OFF else 0.003 + 0.0015 * arm + 0.0001 * arm * batch)
    )
    return alone * (SLOWED[busy] if shared else 1.0)


SETTLE_S = 0.2
"""Between a replica's last response and its training."""


class Replica:
    """Decodes requests of given lengths, and has the engine's own code keep the account."""

    def __init__(self, lengths, arm, accepts, seed, table):
        self.left, self.arm, self.rng = list(lengths), arm, random.Random(seed)
        self.accepts, self.context, self.begun = accepts, 0, False
        self.control = StepControl(FixedPolicy(K), Limits((0, 1, 2, 3)))
        points = [
            {"batch": b, "kv_tokens": 32 * b, "draft_length": k, "seconds": s, "samples": 4, "calibrated": True}
            for k, row in table.items() for b, s in row
        ]  # fmt: skip
        self.control.control(points=points, drafting=arm != OFF)

    def step(self, clock, seconds):
        batch, k, produced = len(self.left), max(self.arm, 0), 0
        verified = k if self.begun else 0
        accepted = [0] * verified
        for i, left in enumerate(self.left):
            got = 1
            while got <= verified and self.rng.random() < self.accepts:
                accepted[got - 1] += 1
                got += 1
            produced += min(got, left)
            self.left[i] = left - min(got, left)
        self.control.choose(Load(batch, self.context))
        self.control.record(
            StepRecord(batch, self.context, self.arm, verified, batch if verified else 0, tuple(accepted), produced,
                       seconds, clean=self.begun),
            num_generation_tokens=produced, num_draft_tokens=verified * batch, unix_s=clock,
        )  # fmt: skip
        self.left, self.context, self.begun = [n for n in self.left if n], self.context + produced, True


def table(context=32):
    """What a calibration measures: one replica alone, on short contexts."""
    batches = (1, 2, 4, 8, 16, 32)
    return {k: [(b, step_s(b, k, 1, context=context * b)) for b in batches] for k in (OFF, 0, 1, 3)}


def rollout(arms, accepts=0.8, seed=0, shared=True, scale=1, begin=1000.0, training=None):
    """({replica: its engine's sums}, seconds until the last one ended); lengths have a long tail.

    `training`: a list; then a replica that is done trains until the last one is, and its times are appended there.
    """
    rng = random.Random(seed)
    lengths = [[scale * int(rng.lognormvariate(4.0, 0.8)) + 5 for _ in range(16)] for _ in arms]
    lengths[0][0] += 150 * scale
    engines = {f"r{i}": Replica(lengths[i], arm, accepts, seed + i, table()) for i, arm in enumerate(arms)}
    ends = dict.fromkeys(engines, begin)
    while any(e.left for e in engines.values()):
        name = min((n for n, e in engines.items() if e.left), key=lambda n: ends[n])
        engine, beside = engines[name], [e for n, e in engines.items() if e.left and n != name]
        busy = 1 + len(beside)
        seconds = step_s(len(engine.left), engine.arm, busy, shared, engine.context * len(engine.left) / 16)
        if shared and any(e.arm != OFF for e in beside):
            seconds *= EASED_BY_DRAFTS
        if training is not None and shared and busy == 1 and ends[name] > min(ends.values()) + SETTLE_S:
            seconds *= SLOWED_BY_TRAINING
        ends[name] += seconds
        engine.step(ends[name], seconds)
    if training is not None and min(ends.values()) + SETTLE_S < max(ends.values()):
        training.append((min(ends.values()) + SETTLE_S, max(ends.values())))
    return {name: e.control.stats() for name, e in engines.items()}, max(ends.values()) - begin


def stretches(stats):
    return {name: s.load_intervals for name, s in stats.items()}


def account(baseline, stats, training=()):
    baseline.learn(stretches(stats), training)
    return baseline.savings(stretches(stats), training)


BOTH_ON, BOTH_OFF = (K, K), (OFF, OFF)


def audits(shared):
    """What audits ask of two replicas (`trainer.audit`)."""
    return [BOTH_OFF] * 4 if shared else [(OFF, K), (K, OFF)]


def claim_and_truth(baseline, accepts, shared, *arms):
    """Seconds saved in four rollouts, by the account and in truth."""
    claimed = truth = 0.0
    for seed in range(4):
        stats, took = rollout(arms[seed % len(arms)], accepts, seed, shared)
        claimed += account(baseline, stats).rollout_s
        truth += rollout(BOTH_OFF, accepts, seed, shared)[1] - took
    assert abs(truth) > 0.1
    return claimed, truth


@pytest.mark.parametrize("accepts", [0.85, 0.6, 0.05], ids=["warm", "middling", "fresh"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("before", ["audit", "off"])
def test_what_was_saved_is_within_15_percent_of_the_truth(accepts, shared, before):
    """One audit, or one rollout in which drafting was off, some steps earlier: then drafted rollouts alone."""
    baseline = Baseline(shared)
    baseline.calibrated(table(), ())
    account(baseline, rollout(BOTH_OFF if before == "off" else audits(shared)[0], accepts, seed=50, shared=shared)[0])
    claimed, truth = claim_and_truth(baseline, accepts, shared, BOTH_ON)
    assert claimed == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("accepts", [0.85, 0.6], ids=["warm", "middling"])
@pytest.mark.parametrize("shared", [True, False])
def test_one_that_rests_while_the_other_drafts_is_not_taken_for_stock(accepts, shared):
    """On a shared machine it is faster than stock's; what it does is not learned, and is not what stock would do."""
    baseline = Baseline(shared)
    baseline.calibrated(table(), ())
    account(baseline, rollout(audits(shared)[0], accepts, seed=50, shared=shared)[0])
    claimed, truth = claim_and_truth(baseline, accepts, shared, (OFF, K), (K, OFF))
    assert claimed == pytest.approx(truth, rel=0.15)
    claimed, truth = claim_and_truth(baseline, accepts, shared, BOTH_ON)
    assert claimed == pytest.approx(truth, rel=0.15)


def audited_and_trained(shared, accepts):
    """A baseline after some audits; whoever was done trained, beside every other one where that slows others down."""
    baseline = Baseline(shared)
    baseline.calibrated(table(), ())
    for seed, arms in enumerate(audits(shared), start=50):
        training = []
        stats, _ = rollout(arms, accepts, seed, shared, training=None if shared and seed % 2 == 0 else training)
        account(baseline, stats, training)
    return baseline


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("arms", "accepts"), [(BOTH_ON, 0.85), (BOTH_ON, 0.05), (BOTH_OFF, 0.05)])
def test_training_that_slows_decoding_is_charged_and_not_to_the_drafter(arms, accepts, shared):
    """All three accounts against runs that differ in one thing: stock's, stock's beside training, and OFF.

    Responses are long enough for a bubble to be long beside what it takes to settle."""
    baseline = audited_and_trained(shared, accepts)
    claimed, truth, trained_s = [0.0, 0.0], [0.0, 0.0], 0.0
    for seed in range(4):
        training = []
        stats, took = rollout(arms, accepts, seed, shared, scale=2, training=training)
        found = account(baseline, stats, training)
        trained_s += sum(end - start for start, end in training)
        for i, (said, beside) in enumerate([(found.rollout_s, None), (found.drafting_s, [])]):
            claimed[i] += said
            truth[i] += rollout(BOTH_OFF, accepts, seed, shared, scale=2, training=beside)[1] - took
    assert trained_s > 1.0
    for said, true in zip(claimed, truth, strict=True):
        assert said == pytest.approx(true, rel=0.15, abs=1e-6)
    assert claimed[1] - claimed[0] == pytest.approx(truth[1] - truth[0], rel=0.2, abs=1e-6), "what training cost stock"
    if arms == BOTH_OFF:
        assert (truth[0] < -0.1) == shared and claimed[1] == pytest.approx(0.0, abs=1e-6)
        assert all(saved_s == 0.0 for saved_s, _ in found.of.values())


def test_beside_training_the_drafter_is_compared_with_steps_beside_training():
    training = []
    baseline, stats = audited_and_trained(True, 0.8), rollout(BOTH_ON, 0.8, 1, training=training)[0]
    saved_s, compared_s = account(baseline, stats, training).of["r0"]
    assert compared_s > 0.9 * sum(row.seconds for row in stats["r0"].load_intervals)
    blamed_s, _ = account(baseline, stats).of["r0"]
    assert saved_s > blamed_s + 0.1, "told of no training, it takes what that costs for the drafter's"


def test_without_live_steps_the_calibration_is_the_baseline_where_it_holds():
    """Of one busy replica; beside another nothing is known on a shared machine, and nothing is claimed."""
    for shared in (False, True):
        baseline = Baseline(shared)
        baseline.calibrated(table(), ())
        assert baseline.off_seconds(3, 1) == pytest.approx(step_s(3, OFF, 1, context=96), rel=0.01)
        assert (baseline.off_seconds(3, 2) is None) == shared
    stats, took = rollout(BOTH_ON, 0.8, 1)
    saved = account(baseline, stats)
    assert saved.rollout_s is None or saved.rollout_s <= rollout(BOTH_OFF, 0.8, 1)[1] - took
    for name, (_, compared_s) in saved.of.items():
        assert compared_s < stats[name].busy_s


def test_drafted_steps_never_change_the_baseline():
    baseline = Baseline(True)
    baseline.calibrated(table(), ())
    account(baseline, rollout(BOTH_OFF, seed=50)[0])
    before = [baseline.off_seconds(batch, busy) for batch in (1, 4, 16) for busy in (1, 2)]
    for seed in range(3):
        account(baseline, rollout(BOTH_ON, 0.05, seed)[0])
    assert [baseline.off_seconds(batch, busy) for batch in (1, 4, 16) for busy in (1, 2)] == before


def test_stock_that_is_faster_than_off_leaves_less_saved():
    plain, faster = Baseline(False), Baseline(False)
    plain.calibrated(table(), ())
    faster.calibrated(table(), stock_points([(1, 0.8, 1.0)]))
    off, drafted = rollout(BOTH_OFF, seed=50, shared=False)[0], rollout(BOTH_ON, seed=1, shared=False)
    assert account(plain, off).rollout_s == pytest.approx(0.0, abs=1e-6)
    assert account(faster, off).rollout_s == pytest.approx(-0.2 * max(s.busy_s for s in off.values()), rel=0.01)
    stock_took = drafted[1] + account(plain, drafted[0]).rollout_s
    assert account(faster, drafted[0]).rollout_s == pytest.approx(0.8 * stock_took - drafted[1], rel=0.01)
    assert account(faster, drafted[0]).of == account(plain, drafted[0]).of, "whether to draft is asked against OFF"


def test_a_drafter_is_not_blamed_for_a_busy_machine_nor_praised_for_it():
    """The engine's own decision follows the trainer's account."""
    baseline = Baseline(True)
    baseline.calibrated(table(), ())
    account(baseline, rollout(BOTH_OFF, seed=50)[0])
    for accepts, pays in ((0.8, True), (0.05, False)):
        stats = rollout(BOTH_ON, accepts, seed=2)[0]
        saved = account(baseline, stats).of["r0"]
        switch = Profitability("goodput")
        switch.learn(EngineStats(), drafting=True, acceptance=[], saved=saved)
        assert switch.decide([]) == pays


def test_a_long_rollout_is_told_in_a_bounded_number_of_stretches():
    stats, took = rollout((OFF,), seed=3, scale=60)
    rows = stats["r0"].load_intervals
    assert MAX_INTERVALS / 4 < len(rows) <= MAX_INTERVALS and stats["r0"].num_steps > 5 * len(rows)
    assert sum(row.seconds for row in rows) == pytest.approx(took, rel=0.01)
    assert all(a.end <= b.start + 1e-6 for a, b in pairwise(rows))
    assert rows[-1].batch == 1.0 and rows[0].batch > 10


def test_a_rollout_without_stretches_says_nothing():
    baseline = Baseline(False)
    assert baseline.savings({}).rollout_s is None
    assert baseline.savings({"a": [LoadInterval(1.0, 2.0, 0.0, 0.0, 0.0, 0.0, True)]}).rollout_s is None


def learned(*seen, shared=True, calibrated=None):
    """A baseline that saw ten OFF steps of one busy replica at each of (batch, seconds of a step)."""
    baseline = Baseline(shared)
    if calibrated:
        baseline.calibrated({OFF: calibrated}, ())
    rows = [
        LoadInterval(float(i), i + 1.0, batch, 0.0, seconds=10 * seconds, plain_steps=10, off=True)
        for i, (batch, seconds) in enumerate(seen)
    ]
    baseline.learn({"r0": rows})
    return baseline


@pytest.mark.parametrize(
    ("seen", "batch", "reached"),
    [(4, 2, False), (4, 3, True), (4, 6, True), (4, 7, False), (16, 10, False), (16, 11, True), (16, 24, True)],
)
def test_a_batch_beyond_reach_of_the_one_that_was_seen_is_compared_with_nothing(seen, batch, reached):
    """Up to half as much again counts as the same."""
    seconds = learned((seen, 0.1)).off_seconds(batch, 1)
    assert seconds == (pytest.approx(0.1) if reached else None)


def test_between_two_that_were_seen_a_step_lies_between_them():
    baseline = learned((4, 0.1), (16, 0.5))
    assert 0.1 < baseline.off_seconds(8, 1) < 0.5
    assert baseline.off_seconds(16, 1) == pytest.approx(0.5)


def test_outside_of_what_was_seen_the_calibration_tells_how_the_nearest_grows():
    """Here steps take twice as long as when they were calibrated, at the largest batch three times."""
    baseline = learned((4, 0.2), (16, 0.6), calibrated=[(1, 0.05), (4, 0.1), (16, 0.2), (64, 0.8)])
    assert baseline.off_seconds(1, 1) == pytest.approx(2 * 0.05), "nearer to 4 than to 16"
    assert baseline.off_seconds(64, 1) == pytest.approx(3 * 0.8), "nearer to 16"


def test_half_of_a_rollout_must_be_compared_and_half_is_enough():
    """One stretch at a load that was seen, one as long at one that was not."""
    baseline = learned((4, 0.1))
    rows = [LoadInterval(0.0, 1.0, 4, 0.0, 1.0, 20, False), LoadInterval(1.0, 2.0, 64, 0.0, 1.0, 20, False)]
    assert baseline.savings({"r0": rows}).rollout_s == pytest.approx(20 * 0.1 - 1.0)
    longer = [rows[0], LoadInterval(1.0, 2.01, 64, 0.0, 1.01, 20, False)]
    assert baseline.savings({"r0": longer}).rollout_s is None


@pytest.mark.parametrize("shared", [False, True])
def test_on_devices_of_its_own_a_replica_takes_what_it_took_however_many_are_busy(shared):
    baseline = Baseline(shared)
    for start, busy, seconds in ((0.0, 1, 0.1), (10.0, 4, 0.2)):
        row = LoadInterval(start, start + 1.0, 4, 0.0, seconds=10 * seconds, plain_steps=10, off=True)
        baseline.learn({f"r{i}": [row] for i in range(busy)})
    assert (baseline.off_seconds(4, 1), baseline.off_seconds(4, 4)) == pytest.approx((0.1, 0.2))
    others = [baseline.off_seconds(4, busy) for busy in (2, 3, 8)]
    assert others == ([None] * 3 if shared else pytest.approx([0.1, 0.2, 0.2])), "the nearest number that was seen"
