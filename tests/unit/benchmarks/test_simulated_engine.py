"""The simulated engine keeps what makes control hard: delay, unclean changes, joins; and counts every token once.

Its costs are monotone, and recorded ones are linear between their points.
"""

from itertools import cycle, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.simulate.engine import Noise, SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100, QWEN_32B_TP4, SwitchCost, TableCost
from benchmarks.simulate.oracles import TrueSpeed, best_per_bucket, static_runs
from benchmarks.simulate.workload import FIG16_ADAPTIVE, Workload, geometric
from verl_tlt.speculation.costs import LatencyPoint, LatencyTable
from verl_tlt.speculation.policies import FixedPolicy
from verl_tlt.speculation.types import OFF

SMALL = Workload(24, geometric(0.7), rollouts=2, median_length=120, max_length=500)


def scripted(*lengths):
    """A policy that cycles through given lengths and keeps what it was told."""
    loads, records, turns = [], [], cycle(lengths)

    def choose(load):
        loads.append(load)
        return next(turns)

    return SimpleNamespace(choose=choose, observe=records.append, loads=loads, records=records)


def test_every_token_is_produced_once_whatever_k():
    tokens = {k: SimulatedEngine(SMALL, QWEN3_8B_H100).run(FixedPolicy(k)).tokens for k in (0, 1, 5)}
    assert len(set(tokens.values())) == 1
    assert tokens[0] == sum(int(SMALL.rollout(i).lengths.sum()) for i in range(2))


def test_what_is_drafted_is_verified_one_step_later():
    policy = scripted(0, 3, 3, 1)
    SimulatedEngine(SMALL, QWEN3_8B_H100).run(policy)
    drafted = [r.drafted for r in policy.records]
    assert drafted[:8] == [0, 3, 3, 1, 0, 3, 3, 1]
    starts = {0} | {i for i, (a, b) in enumerate(pairwise(policy.records), 1) if b.batch > a.batch}
    assert [r.verified for r in policy.records] == [0 if i in starts else k for i, k in enumerate([0, *drafted[:-1]])]
    assert not policy.records[0].clean and any(r.clean for r in policy.records)
    for record in policy.records:
        assert record.clean <= (record.drafted == record.verified), "only steady steps are clean"
        assert len(record.num_accepted_tokens_per_pos) == record.verified
        assert record.num_drafts == (record.batch if record.verified else 0)
        assert list(record.num_accepted_tokens_per_pos) == sorted(record.num_accepted_tokens_per_pos, reverse=True)
        assert record.num_decode_tokens <= record.batch + sum(record.num_accepted_tokens_per_pos)


def test_true_acceptance_is_what_the_records_show():
    policy = scripted(5)
    SimulatedEngine(Workload(64, FIG16_ADAPTIVE, rollouts=2, max_length=800), QWEN3_8B_H100).run(policy)
    accepted = np.sum([r.num_accepted_tokens_per_pos for r in policy.records if r.verified], axis=0)
    trials = sum(r.num_drafts for r in policy.records)
    shares = accepted / np.concatenate(([trials], accepted[:-1]))
    assert shares == pytest.approx(FIG16_ADAPTIVE[:5], abs=0.01)


def test_noise_moves_what_is_seen_not_what_is_charged():
    quiet, loud = (scripted(1), scripted(1))
    calm = SimulatedEngine(SMALL, QWEN3_8B_H100, Noise(0.0)).run(quiet)
    shaken = SimulatedEngine(SMALL, QWEN3_8B_H100, Noise(0.3, stall_chance=0.1)).run(loud)
    assert calm.seconds == shaken.seconds
    assert [r.latency_s for r in quiet.records] != [r.latency_s for r in loud.records]


def test_waiting_requests_join_and_make_the_step_unclean():
    policy = scripted(0)
    SimulatedEngine(Workload(30, geometric(0.7), rollouts=1, max_batch=8, max_length=200), QWEN3_8B_H100).run(policy)
    batches = policy.loads
    assert max(batches) == 8 and batches.count(8) > len(batches) // 3
    joined = [r for before, r in pairwise(policy.records) if r.kv_tokens < before.kv_tokens]
    assert joined and not any(r.clean for r in joined if r.batch == 8)


def test_off_costs_less_than_zero_and_buckets_say_so():
    run = SimulatedEngine(SMALL, QWEN3_8B_H100).run(FixedPolicy(0))
    assert run.worst_bucket_vs_off() == pytest.approx(1.0)
    assert run.worst_bucket_vs_stock() < 1.0
    off = SimulatedEngine(SMALL, QWEN3_8B_H100).run(scripted(OFF))
    assert off.worst_bucket_vs_stock() == pytest.approx(1.0)


def test_oracles_are_ordered():
    """O3 is never behind O2 nor O2 behind O1 by more than the greedy choice at the very end can cost."""
    arms = (0, 1, 2, 3, 5, 7)
    engine = SimulatedEngine(Workload(128, geometric(0.6), rollouts=2, max_length=1500), QWEN3_8B_H100)
    static = static_runs(engine, arms)
    o1 = min(run.seconds for run in static.values())
    o2 = engine.run(best_per_bucket(static)).seconds
    o3 = engine.run(TrueSpeed(arms)).seconds
    assert o3 <= 1.005 * o2 <= 1.005 * 1.005 * o1


@pytest.mark.parametrize("model", [QWEN3_8B_H100, QWEN_32B_TP4])
def test_cost_rises_with_batch_context_and_k(model):
    by_k = [model.seconds(16, 16000, max(k, 0), k) for k in (OFF, 0, 1, 2, 3, 7)]
    assert by_k == sorted(by_k)
    assert model.seconds(32, 32000, 1, 1) > model.seconds(16, 16000, 1, 1)
    assert model.seconds(16, 32000, 1, 1) > model.seconds(16, 16000, 1, 1)


def test_a_change_of_k_pays_for_the_old_draft_and_the_new():
    m = QWEN3_8B_H100
    there, back = m.seconds(8, 8000, 0, 3), m.seconds(8, 8000, 3, 0)
    assert there + back == pytest.approx(m.seconds(8, 8000, 0, 0) + m.seconds(8, 8000, 3, 3))
    priced = SwitchCost(m, 1e-3)
    assert priced.seconds(8, 8000, 0, 3) == pytest.approx(there + 1e-3)
    assert priced.seconds(8, 8000, 3, 3) == m.seconds(8, 8000, 3, 3)


def test_a_table_is_linear_between_its_points_and_beyond():
    measured = {(1, OFF): 0.01, (32, OFF): 0.04, (1, 0): 0.011, (32, 0): 0.044, (1, 4): 0.02, (32, 4): 0.08}
    points = [LatencyPoint(b, 32 * b, k, seconds) for (b, k), seconds in measured.items()]
    cost = TableCost(LatencyTable(tuple(points)))
    assert cost.seconds(1, 32, 0, OFF) == 0.01
    assert cost.seconds(63, 63 * 32, 0, OFF) == pytest.approx(0.07)
    assert cost.seconds(32, 1024, 0, 4) == pytest.approx(0.5 * (0.044 + 0.08))
