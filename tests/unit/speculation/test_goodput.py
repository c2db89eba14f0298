"""The default policy on simulated engines: it finds the length that pays, does not thrash, and probes within bounds."""

import numpy as np
import pytest

from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100
from benchmarks.simulate.oracles import TrueGoodput
from benchmarks.simulate.workload import Workload, geometric
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.policies import HOLD, GoodputPolicy
from verl_tlt.speculation.prober import Probe
from verl_tlt.speculation.types import OFF, Load, Step

ARMS = (0, 1, 2, 3, 5, 7)


class SteadyEngine:
    """Drives a policy at one load, which the caller may change between steps.

    `acceptance` is that of the first draft position, 3 % less at each further one; `sigma` the log-normal jitter of
    measured latencies.
    """

    def __init__(self, policy, acceptance=0.7, batch=8, sigma=0.03, seed=0):
        self.policy, self.acceptance, self.batch, self.sigma = policy, acceptance, batch, sigma
        self.lengths = []  # K of every step so far
        self.seconds = 0.0  # true seconds so far
        self.rng, self.before = np.random.default_rng(seed), 0

    def run(self, steps):
        for _ in range(steps):
            load, before, accepted = Load(self.batch, self.batch * 1000), self.before, []
            k = self.policy.choose(load)
            for position in range(before):
                left = accepted[-1] if accepted else self.batch
                accepted.append(int(self.rng.binomial(left, self.acceptance * 0.97**position)))
            seconds = QWEN3_8B_H100.seconds(*load, before, k)
            latency_s, drafts = seconds * float(self.rng.lognormal(0.0, self.sigma)), self.batch if before else 0
            produced = self.batch + sum(accepted)
            step = Step(*load, k, before, drafts, tuple(accepted), produced, latency_s, clean=k == before)
            self.policy.observe(step)
            self.seconds += seconds
            self.lengths.append(k)
            self.before = k
        return self

    def changes(self):
        return int(np.count_nonzero(np.diff(self.lengths)))

    def usual(self, last=300):
        """The most frequent K of the latest steps."""
        values, counts = np.unique(self.lengths[-last:], return_counts=True)
        return int(values[counts.argmax()])


def best(acceptance, batch):
    tau = [1.0, *(1.0 + np.cumsum(np.cumprod([acceptance * 0.97**i for i in range(7)])))]
    return max(ARMS, key=lambda k: tau[k] / QWEN3_8B_H100.seconds(batch, batch * 1000, k, k))


@pytest.mark.parametrize(("acceptance", "batch"), [(0.9, 1), (0.7, 4), (0.6, 64), (0.7, 256), (0.2, 128)])
def test_it_finds_the_length_that_pays(acceptance, batch):
    engine = SteadyEngine(GoodputPolicy(ARMS), acceptance, batch).run(1500)
    expected = best(acceptance, batch)
    neighbours = ARMS[max(ARMS.index(expected) - 1, 0) : ARMS.index(expected) + 2]
    assert engine.usual() in neighbours
    assert (expected == 0) == (engine.usual() == 0)


def test_it_does_not_thrash_where_two_lengths_are_equally_good():
    """At the batch where K=0 and K=1 break even, K changes a few times per thousand steps, probes included."""

    def apart(batch):
        at_zero, at_one = (QWEN3_8B_H100.seconds(batch, batch * 1000, k, k) for k in (0, 1))
        return abs(1.6 / at_one - 1.0 / at_zero)

    even = min(range(64, 257), key=apart)
    engine = SteadyEngine(GoodputPolicy(ARMS), 0.6, even).run(500)
    start = engine.changes()
    engine.run(4000)
    assert engine.changes() - start < 120


def test_a_batch_oscillating_around_a_threshold_does_not_flip_k():
    policy = GoodputPolicy(ARMS)
    engine = SteadyEngine(policy, 0.6, 130).run(1200)
    start = engine.changes()
    for step in range(1000):
        engine.batch = 130 + (3 if step % 2 else -3)
        engine.run(1)
    assert engine.changes() - start < 40


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_a_dead_drafter_costs_under_one_percent(batch):
    engine = SteadyEngine(GoodputPolicy(ARMS), 0.0, batch).run(3000)
    at_zero = 3000 * QWEN3_8B_H100.seconds(batch, batch * 1000, 0, 0)
    assert engine.seconds < 1.01 * at_zero
    late = np.array(engine.lengths[1500:])
    assert np.count_nonzero(late) < 0.02 * late.size


@pytest.mark.parametrize("batch", [1, 16, 128])
def test_it_wakes_up_when_the_drafter_becomes_useful_unannounced(batch):
    engine = SteadyEngine(GoodputPolicy(ARMS), 0.0, batch).run(2000)
    engine.acceptance = 0.8
    engine.run(700)
    assert engine.usual(last=100) > 0


def test_a_drafter_announced_as_useless_that_wakes_up_is_used_beyond_its_first_token():
    """Zeros behind a first position that is never accepted are no evidence against the others."""
    policy = GoodputPolicy(ARMS)
    policy.set_acceptance([0.0] * 7)
    engine = SteadyEngine(policy, 0.0, 8).run(600)
    assert engine.usual() == 0
    engine.acceptance = 0.7
    assert engine.run(2000).usual() >= 3


def test_an_announced_drafter_is_used_at_once():
    policy = GoodputPolicy(ARMS)
    engine = SteadyEngine(policy, 0.0, 16).run(1500)
    engine.acceptance = 0.8
    policy.set_acceptance([0.8, 0.75, 0.7])
    engine.run(60)
    assert engine.usual(last=40) > 0


def test_it_turns_off_when_acceptance_collapses():
    engine = SteadyEngine(GoodputPolicy(ARMS), 0.8, 64).run(800)
    assert engine.usual() > 0
    engine.acceptance = 0.02
    engine.run(60)
    assert set(engine.lengths[-20:]) <= {0, 1}
    assert engine.run(300).usual() == 0


def test_a_length_is_not_reached_by_jumping_over_unmeasured_ones():
    engine = SteadyEngine(GoodputPolicy(ARMS), 0.95, 256).run(200)
    first = {k: engine.lengths.index(k) for k in set(engine.lengths)}
    assert sorted(first, key=first.get) == sorted(first)


def test_at_a_batch_far_beyond_the_calibration_it_measures_k_zero_before_it_drafts():
    """A calibration ends at batch 32; what drafting costs at 256 is a guess, and so is what it is compared with."""
    policy = GoodputPolicy(ARMS)
    points = [LatencyPoint(b, b * 1000, k, QWEN3_8B_H100.seconds(b, b * 1000, k, k)) for b in (1, 8, 32) for k in ARMS]
    policy.set_latency(LatencyTable(tuple(points)))
    policy.set_acceptance([0.6] * 7)
    engine = SteadyEngine(policy, 0.1, 256).run(60)
    assert engine.lengths[0] == 0
    assert engine.usual() == 0
    engine.acceptance, engine.batch = 0.9, 4
    policy.set_acceptance([0.9] * 7)
    assert engine.run(60).usual(last=30) > 0  # and it does not stay there


def test_a_probe_does_not_outlive_its_rollout():
    """A long draft tried on the last request must not be tried on the next 256."""
    policy = GoodputPolicy(ARMS)
    engine = SteadyEngine(policy, 0.5, 256).run(300)
    large = engine.usual()
    engine.batch = 1
    engine.run(800)
    policy._probe = Probe(len(ARMS) - 1, 8)
    engine.batch = 256
    assert engine.run(5).lengths[-5:] != [7] * 5
    assert engine.run(40).usual(last=20) == large


def test_unclean_steps_teach_no_latency():
    policy = GoodputPolicy(ARMS)
    SteadyEngine(policy, 0.7, 8).run(300)
    before = policy.latency.predict(8, 8000)
    for _ in range(50):
        policy.observe(Step(8, 8000, 3, 3, 8, (6, 4, 2), 20, 9.9, clean=False))
    assert policy.latency.predict(8, 8000) == before


def test_drafting_off_teaches_the_stock_latency():
    policy = GoodputPolicy(ARMS)
    for _ in range(20):
        policy.observe(Step(8, 8000, OFF, 0, 0, (), 8, 0.005, clean=True))
    assert policy.latency.seconds(8, 8000, OFF) == pytest.approx(0.005, rel=0.01)
    assert policy.choose(Load(8, 8000)) == 0


def test_k_does_not_depend_on_the_tokens_of_the_step_it_is_for():
    """K is fixed before the step's record exists: two engines with one past choose alike, whatever comes next."""
    one, other = (SteadyEngine(GoodputPolicy(ARMS), 0.7, 8, seed=1).run(400) for _ in range(2))
    other.acceptance = 0.1
    load = Load(8, 8000)
    assert one.policy.choose(load) == other.policy.choose(load)
    assert set(Load._fields) == {"batch", "kv_tokens"}


@pytest.mark.parametrize(("acceptance", "b0"), [(0.0, 64), (0.7, 64), (0.7, 200)])
def test_it_is_near_the_oracle_on_a_draining_batch(acceptance, b0):
    workload = Workload(b0, geometric(acceptance), rollouts=2, median_length=300, max_length=1500)
    simulated = SimulatedEngine(workload, QWEN3_8B_H100, Noise(0.03))
    mine, oracle = simulated.run(GoodputPolicy(ARMS)), simulated.run(TrueGoodput(ARMS))
    assert oracle.seconds / mine.seconds > 0.97


def test_prefills_that_join_at_every_change_do_not_freeze_k():
    """A change of K looks dear when a prefill sits in its step; K still follows the load."""
    policy = GoodputPolicy(ARMS)
    engine = SteadyEngine(policy, 0.7, 256).run(400)
    for _ in range(30):
        policy.observe(Step(256, 256_000, 1, 0, 0, (), 256, 0.5, clean=False))
    engine.batch = 4
    assert engine.run(200).usual(last=100) >= 2


@pytest.mark.parametrize(("gain", "looks"), [(0.005, None), (0.06, 4), (0.3, 1)])
def test_k_changes_once_staying_has_lost_a_fifth_of_a_step_and_is_then_kept(gain, looks):
    """Drafting must promise 1 % more; the rest of its gain adds up step by step."""
    policy = GoodputPolicy((0, 1))
    cost = {0: 0.010, 1: 0.010 * 1.5 / (1.0 + gain)}
    policy.set_latency(LatencyTable(tuple(LatencyPoint(8, 8000, k, seconds, 9) for k, seconds in cost.items())))
    policy.observe(Step(8, 8000, 0, 0, 0, (), 8, cost[0], clean=True))  # no probe in the next seven steps
    policy.acceptance.set_prior([0.5])
    chosen = [policy.choose(Load(8, 8000)) for _ in range(6 if looks is None else looks)]
    assert chosen[-1] == (looks is not None) and not any(chosen[:-1])
    if looks:
        policy.acceptance.set_prior([0.0])  # the gain is lost at once
        assert [policy.choose(Load(8, 8000)) for _ in range(HOLD - 1)] == [1] * (HOLD - 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_tail_that_costs_more_than_calibrated_is_no_reason_to_try_every_length(seed):
    """Small batches with long contexts cost 1.4 times what was calibrated, whatever the length."""
    lengths = (0, 1, 2, 3, 4, 5)
    points = [
        LatencyPoint(b, 32 * b, k, QWEN3_8B_H100.seconds(b, 32 * b, max(k, 0), k) / (1.0 if b > 32 else 1.4), 4, True)
        for b in (1, 2, 4, 8, 16, 32, 64, 128)
        for k in (OFF, *lengths)
    ]
    policy = GoodputPolicy(lengths)
    policy.set_latency(LatencyTable(tuple(points)))
    policy.set_acceptance([0.8, 0.75, 0.7, 0.65, 0.6])
    engine = SteadyEngine(policy, acceptance=0.8, batch=96, sigma=0.05, seed=seed).run(40)
    engine.batch, engine.lengths = 12, []
    assert len({*engine.run(60).lengths}) <= 3
