"""What drafting saved, in runs whose truth is known: the same requests decoded without a drafter, on one machine."""

import random
from itertools import pairwise

import pytest

from verl_tlt.messages.rollout import EngineStats, LoadInterval
from verl_tlt.speculation.savings import ControlRollouts, SavingsAccount
from verl_tlt.speculation.step_statistics import MAX_INTERVALS, StepSums
from verl_tlt.speculation.types import OFF, Step

K, REQUESTS = 3, 16
SLOWED = {1: 1.0, 2: 1.8}
"""How much longer a step takes by busy replicas, on a machine that they share."""
BESIDE_TRAINING, BESIDE_DRAFTS = 1.3, 0.8
"""And beside a replica that trains, or drafts."""
SETTLE_S = 0.2
"""Between a replica's last response and its training."""


def step_s(batch, arm, busy, shared=True, context=0.0, per_token=2e-7):
    """Seconds: weights, requests and their context, the drafter's pass and what it drafted."""
    drafter = 0.0 if arm == OFF else 0.003 + 0.0015 * arm + 0.0001 * arm * batch
    return (0.010 + 0.0004 * batch + per_token * context + drafter) * (SLOWED[busy] if shared else 1.0)


class Replica:
    """Decodes requests of given lengths, and has the engine's own code keep the account."""

    def __init__(self, lengths, arm, accepts, seed):
        self.left, self.arm, self.rng, self.accepts = list(lengths), arm, random.Random(seed), accepts
        self.context, self.begun, self.sums = 0, False, StepSums()

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
        kv_tokens, drafts = round(self.context * batch / REQUESTS), batch if verified else 0
        step = Step(
            batch, kv_tokens, self.arm, verified, drafts, tuple(accepted), produced, seconds, clean=self.begun,
            num_draft_tokens=verified * batch, unix_s=clock,
        )  # fmt: skip
        self.sums.add(step)
        self.left, self.context, self.begun = [n for n in self.left if n], self.context + produced, True


def rollout(arms, accepts=0.8, seed=0, shared=True, scale=1, begin=1000.0, training=None, per_token=2e-7):
    """({replica: its engine's sums}, seconds until the last one ended); lengths have a long tail.

    `training`: a list; then a replica that is done trains until the last one is, and its times are appended there.
    """
    rng = random.Random(seed)
    lengths = [[scale * int(rng.lognormvariate(4.0, 0.8)) + 5 for _ in range(REQUESTS)] for _ in arms]
    lengths[0][0] += 150 * scale
    engines = {f"r{i}": Replica(lengths[i], arm, accepts, seed + i) for i, arm in enumerate(arms)}
    ends = dict.fromkeys(engines, begin)
    while any(e.left for e in engines.values()):
        name = min((n for n, e in engines.items() if e.left), key=lambda n: ends[n])
        engine, beside = engines[name], [e for n, e in engines.items() if e.left and n != name]
        busy = 1 + len(beside)
        context = engine.context * len(engine.left) / REQUESTS
        seconds = step_s(len(engine.left), engine.arm, busy, shared, context, per_token)
        if shared and any(e.arm != OFF for e in beside):
            seconds *= BESIDE_DRAFTS
        if training is not None and shared and busy == 1 and ends[name] > min(ends.values()) + SETTLE_S:
            seconds *= BESIDE_TRAINING
        ends[name] += seconds
        engine.step(ends[name], seconds)
    if training is not None and min(ends.values()) + SETTLE_S < max(ends.values()):
        training.append((min(ends.values()) + SETTLE_S, max(ends.values())))
    return {name: e.sums.stats() for name, e in engines.items()}, max(ends.values()) - begin


BOTH_ON, BOTH_OFF = (K, K), (OFF, OFF)


def calibrated(shared):
    """An account after a calibration: one replica alone, on short contexts."""
    account = SavingsAccount(shared)
    account.calibrated([(b, step_s(b, OFF, 1, context=32 * b)) for b in (1, 2, 4, 8, 16, 32)])
    return account


def after_control(shared, seed=50, **arguments):
    """An account after a calibration and one control rollout of every replica (`ControlRollouts`)."""
    account = calibrated(shared)
    for arms in [BOTH_OFF] if shared else [(OFF, K), (K, OFF)]:
        account.rollout(rollout(arms, seed=seed, shared=shared, **arguments)[0])
    return account


def claim_and_truth(account, accepts, shared, *arms, **arguments):
    """Seconds saved in four rollouts, by the account and in truth."""
    claimed = truth = 0.0
    for seed in range(4):
        training = []
        stats, took = rollout(arms[seed % len(arms)], accepts, seed, shared, training=training, **arguments)
        claimed += account.rollout(stats, training).saved_s
        truth += rollout(BOTH_OFF, accepts, seed, shared, **arguments)[1] - took
    assert abs(truth) > 0.1
    return claimed, truth


@pytest.mark.parametrize("accepts", [0.85, 0.6, 0.05], ids=["warm", "middling", "fresh"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("scale", [1, 8], ids=["short", "long"])
def test_what_was_saved_is_within_15_percent_of_the_truth(accepts, shared, scale):
    """A control rollout some steps earlier, then drafted rollouts; whoever is done trains, and slows the other down."""
    claimed, truth = claim_and_truth(after_control(shared, scale=scale), accepts, shared, BOTH_ON, scale=scale)
    assert claimed == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("accepts", [0.6, 0.35])
@pytest.mark.parametrize(("seen", "then"), [(8, 16), (16, 4)], ids=["longer", "shorter"])
def test_where_a_step_mostly_reads_the_cache_other_lengths_than_were_seen_are_compared_too(seen, then, accepts):
    """Responses twice as long as in the control rollouts, or a quarter."""
    account, kv = after_control(False, scale=seen, per_token=1e-6), {"scale": then, "per_token": 1e-6}
    drafted, plain = (rollout(arms, accepts, 1, False, **kv)[0] for arms in (BOTH_ON, BOTH_OFF))
    drafted_s, plain_s = (sum(i.seconds for s in r.values() for i in s.load_intervals) for r in (drafted, plain))
    assert account.rollout(drafted).gain == pytest.approx(1.0 - drafted_s / plain_s, abs=0.05)


@pytest.mark.parametrize("accepts", [0.85, 0.6], ids=["warm", "middling"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_replica_that_does_not_draft_while_the_other_does_is_no_measure_on_a_shared_machine(accepts, shared):
    """There it is faster than it would be without TLT."""
    account = after_control(shared)
    for arms in ((OFF, K), (K, OFF)), (BOTH_ON,):
        claimed, truth = claim_and_truth(account, accepts, shared, *arms)
        assert claimed == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("shared", [True, False])
def test_exactly_nothing_is_saved_where_nothing_was_drafted(shared):
    """Whatever training beside it costs, and whatever the machine does meanwhile."""
    account = after_control(shared)
    for seed in range(3):
        training = []
        stats, _ = rollout(BOTH_OFF, seed=seed, shared=shared, scale=2, training=training)
        assert training and account.rollout(stats, training) == (0.0, None)


def test_what_cannot_be_stood_behind_is_not_told():
    assert SavingsAccount(False).rollout({}) == (None, None)
    idle = EngineStats(num_drafts=1, load_intervals=(LoadInterval(1.0, 2.0, 0.0, 0.0, 0.0, 0.0, False),))
    assert SavingsAccount(False).rollout({"a": idle}) == (None, None), "it prefilled only"
    drafted = rollout(BOTH_ON, 0.8, 1)[0]
    assert SavingsAccount(True).rollout(drafted) == (None, None), "nothing was ever measured"
    assert calibrated(True).rollout(drafted).saved_s is None, "a calibration is of one busy replica"
    long = rollout(BOTH_ON, 0.8, 1, shared=False, scale=30)[0]
    assert calibrated(False).rollout(long) == (None, None), "and of short contexts"
    short = rollout(BOTH_ON, 0.8, 1, shared=False)[0]
    assert calibrated(False).rollout(short).saved_s > 0
    assert calibrated(False).rollout(short | {"r2": EngineStats(failure="silent")}).saved_s is None


def test_the_drafter_is_not_blamed_for_training_on_its_processors():
    """What that costs is in the saving, but not in the gain; where most of a rollout was so, no gain is told."""
    account, training = after_control(True), []
    stats = rollout(BOTH_ON, 0.8, 1, training=training)[0]
    told, untold = account.rollout(stats, training), account.rollout(stats)
    assert told.gain > 0.3 and account.rollout(rollout(BOTH_ON, 0.05, 1)[0]).gain < -0.2
    assert told.saved_s == untold.saved_s and told.gain > untold.gain + 0.01
    assert account.rollout(stats, [(0.0, 1e6)]).gain is None


def test_drafted_steps_never_change_what_they_are_compared_with():
    account = after_control(True)

    def measure():
        return [account.off_seconds(batch, 50, busy) for batch in (1, 4, 16) for busy in (1, 2)]

    before = measure()
    for seed in range(3):
        account.rollout(rollout(BOTH_ON, 0.05, seed)[0])
    assert None not in before and measure() == before


def test_a_long_rollout_is_told_in_a_bounded_number_of_intervals():
    stats, took = rollout((OFF,), seed=3, scale=60)
    rows = stats["r0"].load_intervals
    assert MAX_INTERVALS / 4 < len(rows) <= MAX_INTERVALS and stats["r0"].num_steps > 5 * len(rows)
    assert sum(row.seconds for row in rows) == pytest.approx(took, rel=0.01)
    assert all(a.end <= b.start + 1e-6 for a, b in pairwise(rows))
    assert rows[-1].batch == 1.0 and rows[0].batch > 10 and rows[0].context < rows[-1].context


def interval(batch, seconds, steps, start=0.0, context=0.0, off=True):
    return LoadInterval(start, start + 1.0, batch, context, seconds, steps, off)


def learned(*seen, shared=True, off=(), context=0.0):
    """An account that saw ten steps without drafts of one busy replica at each of (batch, seconds of a step)."""
    account = SavingsAccount(shared)
    account.calibrated(off)
    rows = [interval(batch, 10 * s, 10, float(i), context) for i, (batch, s) in enumerate(seen)]
    account.rollout({"r0": EngineStats(load_intervals=tuple(rows))})
    return account


@pytest.mark.parametrize(
    ("seen", "batch", "reached"),
    [(4, 2, False), (4, 3, True), (4, 6, True), (4, 7, False), (16, 10, False), (16, 11, True), (16, 24, True)],
)
def test_a_batch_beyond_reach_of_the_one_that_was_seen_is_compared_with_nothing(seen, batch, reached):
    """Up to half as much again counts as the same."""
    seconds = learned((seen, 0.1)).off_seconds(batch)
    assert seconds == (pytest.approx(0.1, rel=0.01) if reached else None)


def test_between_batches_that_were_seen_it_is_linear_and_outside_the_calibration_tells_how_the_nearest_grows():
    """Here steps take twice as long as when they were calibrated, at the largest batch three times."""
    account = learned((4, 0.2), (16, 0.6), off=[(1, 0.05), (4, 0.1), (16, 0.2), (64, 0.8)], context=32.0)
    assert (account.off_seconds(10), account.off_seconds(16)) == pytest.approx((0.4, 0.6))
    assert account.off_seconds(1) == pytest.approx(2 * 0.05), "nearer to 4 than to 16"
    assert account.off_seconds(64) == pytest.approx(3 * 0.8), "nearer to 16"


@pytest.mark.parametrize(
    ("seen", "asked", "compared"),
    [(0, 500, True), (500, 0, True), (0, 600, False), (600, 0, False), (600, 2000, True), (600, 2100, False)],
)
def test_contexts_are_compared_with_their_like(seen, asked, compared):
    assert (learned((4, 0.1), context=seen).off_seconds(4, asked) is not None) == compared


def test_half_of_a_rollout_must_be_compared_and_half_is_enough():
    """One interval at a load that was seen, one as long at one that was not."""
    account = learned((4, 0.1))
    near, far = interval(4, 1.0, 20, off=False), interval(64, 1.0, 20, 1.0, off=False)
    for last, said in ((far, (1.0, 0.5)), (far._replace(seconds=1.01), (None, None))):
        found = account.rollout({"r0": EngineStats(num_drafts=9, load_intervals=(near, last))})
        assert found == (pytest.approx(said) if said[0] else said)


def test_new_steps_outweigh_old_ones_and_a_few_replace_nothing():
    account = learned((4, 0.1))
    for steps, share in ((1, 0.1), (5000, 0.99)):
        account.rollout({"r0": EngineStats(load_intervals=(interval(4, steps * 0.2, steps),))})
        assert account.off_seconds(4) == pytest.approx(0.1 + share * 0.1, rel=0.02)


@pytest.mark.parametrize("shared", [False, True])
def test_busy_replicas_matter_on_a_shared_machine_alone(shared):
    account = SavingsAccount(shared)
    for start, busy, seconds in ((0.0, 1, 0.1), (10.0, 4, 0.2)):
        row = interval(4, 10 * seconds, 10, start)
        account.rollout({f"r{i}": EngineStats(load_intervals=(row,)) for i in range(busy)})
    found = [account.off_seconds(4, 0.0, busy) for busy in (1, 4, 2)]
    assert found[0] == pytest.approx(0.1 if shared else 0.18, rel=0.02)
    assert found[1:] == ([pytest.approx(0.2), None] if shared else [None, None])


NAMES = ["a", "b", "c"]


def test_each_replica_decodes_a_control_rollout_in_turn_and_all_do_on_a_shared_machine():
    alone, shared = (ControlRollouts(NAMES, 5, shared) for shared in (False, True))
    assert [alone.chosen(step) for step in (2, 5, 7, 12)] == [["a"], [], ["b"], ["c"]]
    assert [shared.chosen(step) for step in (1, 2, 7)] == [[], NAMES, NAMES]
    assert ControlRollouts(NAMES, 0, False).chosen(2) == [] and ControlRollouts(["a"], 1, False).chosen(5) == ["a"]


def control_steps(shared, steps, off_until=0, trained=False, compared=True):
    """(step, replicas) of the control rollouts of a run whose drafter is OFF in its first steps."""
    controls, found = ControlRollouts(NAMES, None, shared), []
    for step in range(1, steps + 1):
        off = NAMES if step <= off_until else controls.chosen(step)
        if off and step > off_until:
            found.append((step, *off))
        controls.ended(off, trained and step <= off_until, compared)
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_by_itself_a_run_has_two_control_rollouts_early_and_then_rarely_one(shared):
    found = control_steps(shared, 600)
    assert [step for step, *_ in found] == [9, 18, 275, 532]
    assert [names for _, *names in found] == ([NAMES] * 4 if shared else [["a"], ["b"], ["c"], ["a"]])
    never = control_steps(shared, 300, compared=False)
    assert [step for step, *_ in never] == [9, 18, 51, 116, 245, 254, 271], "each that does not help doubles the wait"


def test_rollouts_with_the_drafter_off_serve_as_well():
    """Unless training slowed them down."""
    assert control_steps(False, 100, off_until=2) == control_steps(True, 100, off_until=2) == []
    assert control_steps(False, 100, off_until=1) == [(10, "b")]
    assert control_steps(True, 100, off_until=2, trained=True) == [(9, *NAMES), (18, *NAMES)]
