"""Simulated rollouts: against an engine that is stepped through token by token, what costs them time, repeatability."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100, QWEN_32B_TP4, calibration_of, steady
from benchmarks.simulate.workload import Workload, geometric
from verl_tlt.commands.advise.simulation import (
    EngineSpec,
    LogNormal,
    decode,
    from_mean,
    from_moments,
    rollout,
    simulate,
    step_gains,
)
from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.types import OFF

ARMS = (0, 1, 2, 3, 5, 7)
STEADY = steady(QWEN3_8B_H100)


def exact(workload, cost, policy):
    return SimulatedEngine(workload, cost, Noise(0.03)).run(policy).seconds


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
@pytest.mark.parametrize("cost", [QWEN3_8B_H100, QWEN_32B_TP4], ids=["8B", "32B"])
@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_segments_take_as_long_as_the_steps_of_a_policy(policy, cost, acceptance):
    w = Workload(160, geometric(acceptance), rollouts=1, max_batch=64, median_length=500)
    stepped = make_policy(policy, ARMS)
    stepped.set_latency(calibration_of(cost, ARMS))
    stepped.set_acceptance(list(w.acceptance))
    spec = EngineSpec(steady(cost), ARMS if policy == "goodput" else ARMS[-1:], max_batch=64)
    found = decode(spec, w.rollout(0).lengths, w.prompt, step_gains(spec, w.acceptance, 160))
    assert found.seconds == pytest.approx(exact(w, cost, stepped), rel=0.02)
    assert sum(found.seconds_by_batch.values()) == pytest.approx(found.seconds)


def test_stock_takes_as_long_as_steps():
    w = Workload(160, (0.0,), rollouts=1, max_batch=64, median_length=500)
    found = decode(EngineSpec(STEADY, max_batch=64), w.rollout(0).lengths, w.prompt)
    off = SimpleNamespace(choose=lambda load: OFF, observe=lambda step: None)
    assert found.seconds == pytest.approx(exact(w, QWEN3_8B_H100, off), rel=0.01)


def test_requests_that_differ_in_acceptance_end_later():
    """The rollout waits for its slowest response, however good the mean."""
    lengths, rng = np.full(64, 2000), np.random.default_rng(0)
    same, different = (rollout(EngineSpec(STEADY, spread=s), lengths, 100, (0.7, 0.7, 0.7), rng) for s in (0.0, 0.2))
    assert different[1].seconds > 1.03 * same[1].seconds


def test_requests_that_the_kv_cache_does_not_hold_wait():
    """With room for all nothing changes; with room for a quarter of them it takes much longer."""
    spec, lengths = EngineSpec(STEADY, max_batch=64), np.full(64, 1000)
    rooms = (np.inf, 64 * 1300, 16 * 1100)
    whole, ample, tight = (decode(replace(spec, kv_tokens=tokens), lengths, 100) for tokens in rooms)
    assert ample.seconds == whole.seconds and tight.seconds > 1.5 * whole.seconds
    assert max(whole.seconds_by_batch) == 64 and sum(s for b, s in tight.seconds_by_batch.items() if b > 32) < 2.0
    assert decode(replace(spec, kv_tokens=10), lengths[:3], 100).seconds_by_batch.keys() == {1}


def test_prompts_and_long_contexts_cost():
    spec = EngineSpec(STEADY, prefill_token_s=1e-4)
    short, long = (decode(spec, np.full(8, 500), prompt).seconds for prompt in (100, 8000))
    assert long - short > 8 * 7900 * 1e-4


def test_many_tokens_use_all_experts():
    sparse = replace(QWEN3_8B_H100, active_share=0.1)
    one, many = (sparse.verify_s(1, 0, n) / QWEN3_8B_H100.verify_s(1, 0, n) for n in (1, 64))
    assert one < 0.3 and many == pytest.approx(1.0, abs=0.01)


RUN = {
    "engine": EngineSpec(steady(QWEN3_8B_H100)), "replicas": 4, "requests": 64, "lengths": LogNormal(800, 1.0, 8192),
    "acceptance": (0.8, 0.75, 0.7), "steps": 2,
}  # fmt: skip


def test_a_good_drafter_is_faster_and_a_useless_one_as_fast_as_stock():
    good, useless = simulate(**RUN), simulate(**{**RUN, "acceptance": (0.02, 0.02, 0.02)})
    assert good.speed > 1.5 and useless.speed == pytest.approx(1.0)
    assert good.stock_s == useless.stock_s and good.tokens == useless.tokens
    assert 0.0 < good.tail_share <= 1.0
    assert good == simulate(**RUN) != simulate(**{**RUN, "seed": 1})
    assert good.bubble_share > 0.1
    assert simulate(**{**RUN, "replicas": 1}).bubble_share == pytest.approx(0.0), "nobody waits for anybody"


@pytest.mark.parametrize(("median", "sigma"), [(1000, 0.5), (2000, 1.1)])
def test_lengths_are_recovered_from_what_verl_logs(median, sigma):
    drawn = LogNormal(median, sigma, 8192).draw(np.random.default_rng(0), 200_000)
    clipped = float((drawn == 8192).mean())
    found = from_moments(float(drawn.mean()), float(drawn.max()), clipped, drawn.size, 8192)
    again = found.draw(np.random.default_rng(1), 200_000)
    assert again.mean() == pytest.approx(drawn.mean(), rel=0.03) == found.mean()
    assert np.quantile(again, 0.95) == pytest.approx(np.quantile(drawn, 0.95), rel=0.15)
    assert from_mean(found.mean(), found.sigma, 8192).median == pytest.approx(found.median, rel=1e-3)
