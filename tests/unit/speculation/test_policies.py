"""The policies: every one by name, and the default one on simulated engines.

The default finds the length that pays, does not thrash, and probes within bounds.
"""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100, calibration_of
from benchmarks.simulate.oracles import TrueGoodput
from benchmarks.simulate.workload import Workload, geometric
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.decision import RolloutDecision
from verl_tlt.speculation.policies import HOLD, POLICIES, GoodputPolicy, make_policy
from verl_tlt.speculation.prober import Probe
from verl_tlt.speculation.types import OFF, ControlError, Load, Step

ARMS = (0, 1, 2, 3, 5, 7)
FEW = (0, 1, 3)


def table_of(seconds, batches, lengths=FEW, context=500, **more):
    """A table of `seconds(batch, K)`."""
    points = [LatencyPoint(b, b * context, k, seconds(b, k), 5, **more) for b in batches for k in lengths]
    return LatencyTable(tuple(points))


# ---------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_takes_every_call_and_every_step(name):
    """A rollout begins with prefills only: nobody decodes, and K may just have changed."""
    policy, before = make_policy(name, FEW), 0
    policy.set_acceptance([0.8, 0.7])
    policy.set_latency(table_of(lambda _, k: 0.01 * (1 + 0.1 * k), (1, 64)))
    for turn in range(50):
        k = policy.choose(Load(4, 2000))
        assert k in FEW
        drafts = 4 if before else 0
        policy.observe(Step(4, 2000, k, before, drafts, (4,) * before, 4 * (1 + before), 0.01, k == before))
        drafted, verified = ((0, 3), (3, 0), (1, 3), (OFF, 0), (0, 0), (3, 3))[turn % 6]
        policy.observe(Step(0, 0, drafted, verified, 0, (0,) * verified, 0, 0.5, clean=False))
        before = k


def test_table_is_the_argmax_of_what_it_was_given():
    policy = make_policy("table", FEW)
    policy.set_acceptance([0.9, 0.9, 0.9])
    assert policy.choose(Load(1, 500)) == 0, "nothing measured yet"
    policy.set_latency(table_of(lambda b, k: 0.01 * (1 + k * (0.02 if b == 1 else 1.0)), (1, 64)))
    assert policy.choose(Load(1, 500)) == 3
    assert policy.choose(Load(64, 32000)) == 0
    policy.set_acceptance([0.0])
    assert policy.choose(Load(1, 500)) == 0


@pytest.mark.parametrize(("name", "fixed", "says"), [("godput", None, "'godput' .* goodput"), ("fixed", 2, "fixed=2")])
def test_what_cannot_be_right_is_refused_in_one_sentence(name, fixed, says):
    with pytest.raises(ControlError, match=says) as error:
        make_policy(name, (0, 1), fixed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("known", "chosen", "drafts"), [(0.07, 3, True), (1.0, 1, False)])
def test_all_experts_of_a_mixture_are_awake_at_large_batches(known, chosen, drafts):
    """A token uses 7 % of its weights. Costs beyond a calibrated batch of 32 were those of a dense policy, which stops
    drafting there, in engine and trainer.
    """
    truth, acceptance = replace(QWEN3_8B_H100, active_share=0.07), [0.8, 0.75, 0.7]
    calibration = calibration_of(replace(truth, token_s=0.07 * truth.token_s), FEW)
    engine = make_policy("table", FEW, active_share=known)
    engine.set_latency(calibration)
    engine.set_acceptance(acceptance)
    assert engine.choose(Load(128, 128 * 32)) == chosen
    trainer = RolloutDecision("goodput", active_share=known)
    trainer.calibrated(calibration)
    trainer.learn([EngineStats(tokens_by_batch={128: 100_000})], None)
    assert trainer.drafts(acceptance) == drafts


# ---------------------------------------------------------------------- goodput, on simulated engines


def true_s(batch, k, context=1000):
    return QWEN3_8B_H100.seconds(batch, batch * context, max(k, 0), k)


class SteadyEngine:
    """Drives a policy at one load, which the caller may change between steps.

    `acceptance` is that of the first draft position, 3 % less at each further one; `sigma` the log-normal jitter of
    measured latencies.
    """

    def __init__(self, acceptance=0.7, batch=8, sigma=0.03, seed=0, lengths=ARMS):
        self.policy, self.acceptance, self.batch, self.sigma = GoodputPolicy(lengths), acceptance, batch, sigma
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
        return max(ARMS, key=self.lengths[-last:].count)


def best(acceptance, batch):
    tau = [1.0, *(1.0 + np.cumsum(np.cumprod([acceptance * 0.97**i for i in range(7)])))]
    return max(ARMS, key=lambda k: tau[k] / true_s(batch, k))


@pytest.mark.parametrize(("acceptance", "batch"), [(0.9, 1), (0.7, 4), (0.6, 64), (0.7, 256), (0.2, 128)])
def test_it_finds_the_length_that_pays(acceptance, batch):
    usual, expected = SteadyEngine(acceptance, batch).run(1500).usual(), ARMS.index(best(acceptance, batch))
    assert usual in ARMS[max(expected - 1, 0) : expected + 2]
    assert (expected == 0) == (usual == 0)


def test_it_does_not_thrash_where_two_lengths_are_equally_good():
    """At the batch where K=0 and K=1 break even, K changes a few times per thousand steps, probes included."""
    even = min(range(64, 257), key=lambda batch: abs(1.6 / true_s(batch, 1) - 1.0 / true_s(batch, 0)))
    engine = SteadyEngine(0.6, even).run(500)
    start = engine.changes()
    assert engine.run(4000).changes() - start < 120


def test_a_batch_oscillating_around_a_threshold_does_not_flip_k():
    engine = SteadyEngine(0.6, 130).run(1200)
    start = engine.changes()
    for step in range(1000):
        engine.batch = 130 + (3 if step % 2 else -3)
        engine.run(1)
    assert engine.changes() - start < 40


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_a_dead_drafter_costs_under_one_percent(batch):
    engine = SteadyEngine(0.0, batch).run(3000)
    assert engine.seconds < 1.01 * 3000 * true_s(batch, 0)
    assert np.count_nonzero(engine.lengths[1500:]) < 0.02 * 1500


@pytest.mark.parametrize("batch", [1, 16, 128])
def test_it_wakes_up_when_the_drafter_becomes_useful_unannounced(batch):
    engine = SteadyEngine(0.0, batch).run(2000)
    engine.acceptance = 0.8
    assert engine.run(700).usual(last=100) > 0


def test_a_drafter_announced_as_useless_that_wakes_up_is_used_beyond_its_first_token():
    """Zeros behind a first position that is never accepted are no evidence against the others."""
    engine = SteadyEngine(0.0, 8)
    engine.policy.set_acceptance([0.0] * 7)
    assert engine.run(600).usual() == 0
    engine.acceptance = 0.7
    assert engine.run(2000).usual() >= 3


def test_an_announced_drafter_is_used_at_once():
    engine = SteadyEngine(0.0, 16).run(1500)
    engine.acceptance = 0.8
    engine.policy.set_acceptance([0.8, 0.75, 0.7])
    assert engine.run(60).usual(last=40) > 0


def test_it_turns_off_when_acceptance_collapses():
    engine = SteadyEngine(0.8, 64).run(800)
    assert engine.usual() > 0
    engine.acceptance = 0.02
    assert set(engine.run(60).lengths[-20:]) <= {0, 1}
    assert engine.run(300).usual() == 0


def test_a_length_is_not_reached_by_jumping_over_unmeasured_ones():
    engine = SteadyEngine(0.95, 256).run(200)
    assert list(dict.fromkeys(engine.lengths)) == sorted({*engine.lengths})


def test_at_a_batch_far_beyond_the_calibration_it_measures_k_zero_before_it_drafts():
    """A calibration ends at batch 32; what drafting costs at 256 is a guess, and so is what it is compared with."""
    engine = SteadyEngine(0.1, 256)
    engine.policy.set_latency(table_of(true_s, (1, 8, 32), ARMS, 1000))
    engine.policy.set_acceptance([0.6] * 7)
    assert engine.run(60).lengths[0] == 0 == engine.usual()
    engine.acceptance, engine.batch = 0.9, 4
    engine.policy.set_acceptance([0.9] * 7)
    assert engine.run(60).usual(last=30) > 0, "it does not stay there"


def test_a_probe_does_not_outlive_its_rollout():
    """A long draft tried on the last request must not be tried on the next 256."""
    engine = SteadyEngine(0.5, 256).run(300)
    large = engine.usual()
    engine.batch = 1
    engine.run(800).policy._probe = Probe(len(ARMS) - 1, 8)
    engine.batch = 256
    assert engine.run(5).lengths[-5:] != [7] * 5
    assert engine.run(40).usual(last=20) == large


def test_unclean_steps_teach_no_latency():
    policy = SteadyEngine().run(300).policy
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


@pytest.mark.parametrize(("acceptance", "b0"), [(0.0, 64), (0.7, 64), (0.7, 200)])
def test_it_is_near_the_oracle_on_a_draining_batch(acceptance, b0):
    workload = Workload(b0, geometric(acceptance), rollouts=2, median_length=300, max_length=1500)
    simulated = SimulatedEngine(workload, QWEN3_8B_H100, Noise(0.03))
    mine, oracle = simulated.run(GoodputPolicy(ARMS)), simulated.run(TrueGoodput(ARMS))
    assert oracle.seconds / mine.seconds > 0.97


def test_prefills_that_join_at_every_change_do_not_freeze_k():
    """A change of K looks dear when a prefill sits in its step; K still follows the load."""
    engine = SteadyEngine(0.7, 256).run(400)
    for _ in range(30):
        engine.policy.observe(Step(256, 256_000, 1, 0, 0, (), 256, 0.5, clean=False))
    engine.batch = 4
    assert engine.run(200).usual(last=100) >= 2


@pytest.mark.parametrize(("gain", "looks"), [(0.005, None), (0.06, 4), (0.3, 1)])
def test_k_changes_once_staying_has_lost_a_fifth_of_a_step_and_is_then_kept(gain, looks):
    """Drafting must promise 1 % more; the rest of its gain adds up step by step."""
    policy = GoodputPolicy((0, 1))
    policy.set_latency(table_of(lambda _, k: 0.01 if k == 0 else 0.01 * 1.5 / (1.0 + gain), (8,), (0, 1), 1000))
    policy.observe(Step(8, 8000, 0, 0, 0, (), 8, 0.01, clean=True))  # no probe in the next seven steps
    policy.acceptance.set_prior([0.5])
    chosen = [policy.choose(Load(8, 8000)) for _ in range(6 if looks is None else looks)]
    assert chosen[-1] == (looks is not None) and not any(chosen[:-1])
    if looks:
        policy.acceptance.set_prior([0.0])  # the gain is lost at once
        assert [policy.choose(Load(8, 8000)) for _ in range(HOLD - 1)] == [1] * (HOLD - 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_tail_that_costs_more_than_calibrated_is_no_reason_to_try_every_length(seed):
    """Small batches with long contexts cost 1.4 times what was calibrated, whatever the length."""
    engine = SteadyEngine(acceptance=0.8, batch=96, sigma=0.05, seed=seed, lengths=(0, 1, 2, 3, 4, 5))
    batches, lengths = (1, 2, 4, 8, 16, 32, 64, 128), (OFF, 0, 1, 2, 3, 4, 5)
    cheap = table_of(lambda b, k: true_s(b, k, 32) / (1.0 if b > 32 else 1.4), batches, lengths, 32, calibrated=True)
    engine.policy.set_latency(cheap)
    engine.policy.set_acceptance([0.8, 0.75, 0.7, 0.65, 0.6])
    engine.run(40)
    engine.batch, engine.lengths = 12, []
    assert len({*engine.run(60).lengths}) <= 3
