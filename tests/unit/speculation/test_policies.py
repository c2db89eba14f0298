"""`make_policy`: every policy by name, hooks tolerated by all, and one sentence for what cannot be right."""

from dataclasses import replace

import pytest

from benchmarks.simulate.hardware import QWEN3_8B_H100, calibration_of
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.decision import RolloutDecision
from verl_tlt.speculation.policies import POLICIES, make_policy
from verl_tlt.speculation.types import OFF, ControlError, Load, Step

TABLE = LatencyTable(tuple(LatencyPoint(b, b * 500, k, 0.01 * (1 + 0.1 * k), 5) for b in (1, 64) for k in (0, 1, 3)))


def step(drafted, verified=0, batch=4):
    drafts, accepted, produced = batch if verified else 0, (batch,) * verified, batch * (1 + verified)
    return Step(batch, batch * 500, drafted, verified, drafts, accepted, produced, 0.01, drafted == verified)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_takes_every_call_and_every_step(name):
    """A rollout begins with prefills only: nobody decodes, and K may just have changed."""
    policy, before = make_policy(name, (0, 1, 3)), 0
    policy.set_acceptance([0.8, 0.7])
    policy.set_latency(TABLE)
    for turn in range(50):
        k = policy.choose(Load(4, 2000))
        assert k in (0, 1, 3)
        policy.observe(step(k, before))
        drafted, verified = ((0, 3), (3, 0), (1, 3), (OFF, 0), (0, 0), (3, 3))[turn % 6]
        policy.observe(Step(0, 0, drafted, verified, 0, (0,) * verified, 0, 0.5, clean=False))
        before = k


def test_table_is_the_argmax_of_what_it_was_given():
    policy = make_policy("table", (0, 1, 3))
    policy.set_acceptance([0.9, 0.9, 0.9])
    assert policy.choose(Load(1, 500)) == 0, "nothing measured yet"
    cheap_when_small = [
        LatencyPoint(b, b * 500, k, 0.01 * (1 + k * (0.02 if b == 1 else 1.0)), 5) for b in (1, 64) for k in (0, 1, 3)
    ]
    policy.set_latency(LatencyTable(tuple(cheap_when_small)))
    assert policy.choose(Load(1, 500)) == 3
    assert policy.choose(Load(64, 32000)) == 0
    policy.set_acceptance([0.0])
    assert policy.choose(Load(1, 500)) == 0


@pytest.mark.parametrize(
    ("name", "arms", "fixed", "says"),
    [
        ("godput", (0, 1), None, "Speculation policy 'godput' does not exist; known: goodput"),
        ("fixed", (0, 1), 2, "fixed=2"),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_sentence(name, arms, fixed, says):
    with pytest.raises(ControlError) as error:
        make_policy(name, arms, fixed)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("known", "chosen", "drafts"), [(0.07, 3, True), (1.0, 1, False)])
def test_all_experts_of_a_mixture_are_awake_at_large_batches(known, chosen, drafts):
    """A token uses 7 % of its weights. Costs beyond a calibrated batch of 32 were those of a dense policy, which stops
    drafting there, in engine and trainer.
    """
    truth, arms, acceptance = replace(QWEN3_8B_H100, active_share=0.07), (0, 1, 3), [0.8, 0.75, 0.7]
    calibration = calibration_of(replace(truth, token_s=0.07 * truth.token_s), arms)
    engine = make_policy("table", arms, active_share=known)
    engine.set_latency(calibration)
    engine.set_acceptance(acceptance)
    assert engine.choose(Load(128, 128 * 32)) == chosen
    trainer = RolloutDecision("goodput", active_share=known)
    trainer.calibrated(calibration)
    trainer.learn([EngineStats(tokens_by_batch={128: 100_000})], None)
    assert trainer.drafts(acceptance) == drafts
