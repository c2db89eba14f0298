"""Segments against an engine that is stepped through, and what the control code makes of a drafter."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100, QWEN_32B_TP4
from benchmarks.simulate.workload import Workload, geometric
from verl_tlt.advise.replica import EngineSpec, Replica, decode_as_stock
from verl_tlt.advise.step_costs import LearnedCost
from verl_tlt.errors import TLTError
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.policies.factory import make_policy
from verl_tlt.speculation.types import OFF

ARMS = (0, 1, 2, 3, 5, 7)


class Off:
    """A policy that runs no drafter."""

    def choose(self, load):
        return OFF

    def observe(self, step):
        pass


def exact(workload, cost, policy):
    return SimulatedEngine(workload, cost, Noise(0.03)).run(policy).seconds


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
@pytest.mark.parametrize("cost", [QWEN3_8B_H100, QWEN_32B_TP4], ids=["8B", "32B"])
@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_segments_take_as_long_as_steps(policy, cost, acceptance):
    w = Workload(160, geometric(acceptance), rollouts=1, max_batch=64, median_length=500)
    true = np.array(w.acceptance)
    replica = Replica(EngineSpec(cost, ARMS, policy, max_batch=64), seed=0)
    replica.decision._always = True  # the exact engine drafts too
    stepped = make_policy(policy, ARMS)
    stepped.set_latency(replica.control.costs.to_table())
    stepped.set_acceptance(list(w.acceptance))
    lengths = w.rollout(0).lengths
    found = replica.rollout(lengths, w.prompt, true, true)
    assert found.seconds == pytest.approx(exact(w, cost, stepped), rel=0.02)
    assert found.tokens == pytest.approx(lengths.sum(), rel=1e-9)
    assert sum(found.seconds_by_batch.values()) == pytest.approx(found.seconds)


def test_stock_takes_as_long_as_steps():
    w = Workload(160, (0.0,), rollouts=1, max_batch=64, median_length=500)
    found = decode_as_stock(EngineSpec(QWEN3_8B_H100, max_batch=64), w.rollout(0).lengths, w.prompt)
    assert found.seconds == pytest.approx(exact(w, QWEN3_8B_H100, Off()), rel=0.01)
    assert not found.drafting and found.tokens == w.rollout(0).lengths.sum()


def test_a_drafter_that_is_never_right_is_off_and_costs_nothing():
    replica, never = Replica(EngineSpec(QWEN3_8B_H100), seed=0), np.zeros(3)
    lengths = np.full(40, 300)
    found = replica.rollout(lengths, 100, never, never)
    assert not found.drafting and found.seconds == pytest.approx(decode_as_stock(replica.spec, lengths, 100).seconds)


def test_a_broken_promise_costs_one_rollout_at_most():
    """It promised much and keeps nothing: K is 0 within the rollout, and the drafter off in the next."""
    replica, lengths = Replica(EngineSpec(QWEN3_8B_H100), seed=0), np.full(64, 2000)
    first = replica.rollout(lengths, 100, np.full(3, 0.9), np.zeros(3))
    base = decode_as_stock(replica.spec, lengths, 100).seconds
    assert first.drafting and base < first.seconds < 1.15 * base
    assert not replica.rollout(lengths, 100, np.full(3, 0.9), np.zeros(3)).drafting


def test_requests_that_differ_in_acceptance_end_later():
    """The rollout waits for its slowest response, however good the mean."""
    lengths, good = np.full(64, 2000), np.full(3, 0.7)
    seconds = [
        Replica(EngineSpec(QWEN3_8B_H100, spread=spread), seed=0).rollout(lengths, 100, good, good).seconds
        for spread in (0.0, 0.2)
    ]
    assert seconds[1] > 1.03 * seconds[0]


def test_prompts_and_long_contexts_cost():
    lengths = np.full(8, 500)
    spec = EngineSpec(QWEN3_8B_H100, prefill_token_s=1e-4)
    short, long = decode_as_stock(spec, lengths, 100).seconds, decode_as_stock(spec, lengths, 8000).seconds
    assert long - short > 8 * 7900 * 1e-4


def test_many_tokens_use_all_experts():
    sparse = replace(QWEN3_8B_H100, active_share=0.1)
    one, many = (sparse.verify_s(1, 0, n) / QWEN3_8B_H100.verify_s(1, 0, n) for n in (1, 64))
    assert one < 0.3 and many == pytest.approx(1.0, abs=0.01)


def test_scattered_measurements_are_completed():
    """Each draft length was used at some batches only, as in a run; the others follow from the shape of the costs."""
    used = {0: (4, 16, 64), 1: (24, 32, 48), 3: (8, 12, 20), 5: (1, 2, 4, 6)}
    points = [
        LatencyPoint(b, 900 * b, k, QWEN3_8B_H100.seconds(b, 900 * b, k, k), 16) for k, at in used.items() for b in at
    ]
    cost = LearnedCost(LatencyTable(tuple(points)))
    for batch, k in ((1, 1), (1, 3), (32, 3), (32, 0), (4, OFF)):
        true = QWEN3_8B_H100.seconds(batch, 900 * batch, max(k, 0), k)
        assert cost.seconds(batch, 900 * batch, max(k, 0), k) == pytest.approx(true, rel=0.15)
    assert cost.longest == 5 and cost.seconds(4, 3600, 0, 5) < cost.seconds(4, 3600, 5, 5)
    with pytest.raises(TLTError, match="does not say what a step costs"):
        LearnedCost(LatencyTable(()))
