"""Simulated costs: calibrated to the paper where it has numbers, monotone, padded, recorded."""

import dataclasses

import numpy as np
import pytest

from benchmarks.simulate.hardware import QWEN3_8B_H100, QWEN_32B_TP4, SwitchCost, TableCost
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.types import OFF

BATCHES = (1, 2, 4, 8, 16, 32)
SPEEDUP = {
    16: (3.22, 3.08, 3.01, 2.73, 2.67, 2.48),
    32: (3.46, 3.28, 3.09, 2.63, 2.52, 2.23),
    48: (3.56, 3.39, 3.13, 2.51, 2.24, 1.90),
    64: (3.62, 3.38, 2.98, 2.27, 1.91, 1.70),
}
"""TLT Table 4: speed-up by verified tokens and batch (tree of depth 10, top-8, Qwen-32B, TP4)."""
ACCEPT_LENGTH = {16: 6.80, 32: 7.63, 48: 7.97, 64: 8.21}
"""TLT Fig. 13: accept length at depth 10."""


def modelled_speedup(batch, verify, context=13_700):
    """One cell of Table 4: a tree of depth 10, passes of 8 tokens, `verify` tokens verified; the context is fitted."""
    model = QWEN_32B_TP4
    stock = model.verify_s(batch, batch * context, 1)
    drafting = 10 * (model.pass_s + 8 * model.request_pass_s * batch)
    return ACCEPT_LENGTH[verify] * stock / (model.verify_s(batch, batch * context, verify) + drafting)


def test_the_32b_model_reproduces_table_4():
    """Each of the paper's 24 speed-ups within 7 %, 3 % rms."""
    errors = [
        np.log(modelled_speedup(batch, verify) / paper)
        for verify, row in SPEEDUP.items()
        for batch, paper in zip(BATCHES, row, strict=True)
    ]
    assert np.max(np.abs(errors)) < 0.07
    assert np.sqrt(np.mean(np.square(errors))) < 0.03


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


def test_graphs_pad_and_end():
    padded = dataclasses.replace(QWEN3_8B_H100, capture=(64, 512), eager_s=1e-3)
    assert padded.verify_s(65, 0, 1) == padded.verify_s(128, 0, 4) == QWEN3_8B_H100.verify_s(512, 0, 1)
    assert padded.verify_s(513, 0, 1) == pytest.approx(QWEN3_8B_H100.verify_s(513, 0, 1) + 1e-3)


def test_a_table_is_linear_between_its_points_and_beyond():
    measured = {(1, OFF): 0.01, (32, OFF): 0.04, (1, 0): 0.011, (32, 0): 0.044, (1, 4): 0.02, (32, 4): 0.08}
    points = [LatencyPoint(b, 32 * b, k, seconds) for (b, k), seconds in measured.items()]
    cost = TableCost(LatencyTable(tuple(points)))
    assert cost.seconds(1, 32, 0, OFF) == 0.01
    assert cost.seconds(63, 63 * 32, 0, OFF) == pytest.approx(0.07)
    assert cost.seconds(32, 1024, 0, 4) == pytest.approx(0.5 * (0.044 + 0.08))
