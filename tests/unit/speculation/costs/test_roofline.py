"""The fitted roofline: it rises with its inputs, and a fit finds what was measured."""

from dataclasses import replace

import pytest

from benchmarks.simulate.hardware import QWEN3_8B_H100, calibration_of
from verl_tlt.drafter.policy import active_share
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.roofline import Roofline, weights_read
from verl_tlt.speculation.types import OFF

BATCH, KV, SECONDS = 16, 8192.0, 0.020


ROWS = [(batch, 100.0 * batch, k) for batch in (1, 4, 16, 64, 256) for k in (OFF, 0, 1, 3, 7)]


def started():
    shape = Roofline()
    shape.start(BATCH, KV, SECONDS)
    return shape


@pytest.fixture
def usual():
    return started()


def test_every_further_part_of_a_step_costs_more(usual):
    """OFF has no drafter, K=0 its pass, K=1 a draft token, each further one a pass more."""
    by_length = [usual.seconds(BATCH, KV, k) for k in (OFF, 0, 1, 2, 3)]
    by_batch = [usual.seconds(batch, KV, 3) for batch in (1, 4, 16, 64)]
    by_context = [usual.seconds(BATCH, kv, 3) for kv in (KV / 2, KV, 2 * KV)]
    assert all(costs == sorted(set(costs)) for costs in (by_length, by_batch, by_context))
    assert usual.ready and not Roofline().ready
    assert usual.seconds(BATCH, KV, 0) == pytest.approx(SECONDS, rel=0.25), "about the step it was told"


def test_a_fit_finds_the_sync_that_off_does_not_pay(usual):
    """Off by the usual share at first: steps without a drafter take 30 % less than those at K=0."""
    rows = [(batch, 100.0 * batch, k) for batch in (1, 4, 16, 64) for k in (OFF, 0, 1, 3)]
    truth = [(0.7 if k == OFF else 1.0) * SECONDS + max(k, 0) * 0.002 for _, _, k in rows]
    usual.fit(rows, truth, [16.0] * len(rows), 20)
    found = {k: usual.seconds(16, 1600.0, k) for k in (OFF, 0, 1, 3)}
    assert found[OFF] / found[0] == pytest.approx(0.7, abs=0.08)
    assert found[3] > found[1] > found[0]


def test_a_stall_among_the_measured_hardly_moves_the_fit(usual):
    truth = [SECONDS * (1 + batch * (max(k, 0) + 1) / 400) for batch, _, k in ROWS]
    stalled = [8 * seconds if row == (16, 1600.0, 3) else seconds for row, seconds in zip(ROWS, truth, strict=True)]
    found = []
    for measured in (truth, stalled):
        shape = started()
        shape.fit(ROWS, measured, [16.0] * len(ROWS), 30)
        found.append([shape.seconds(*row) for row in ROWS])
    assert found[1] == pytest.approx(found[0], rel=0.03)


# ---------------------------------------------------------------------- mixtures of experts


@pytest.mark.parametrize(("share", "tokens", "read"), [(1.0, 1, 1.0), (1.0, 500, 1.0), (0.1, 1, 0.1), (0.1, 8, 0.5695)])
def test_every_token_wakes_more_experts(share, tokens, read):
    """By hand: 1 - 0.9^8 = 0.5695."""
    assert weights_read(share, tokens) == pytest.approx(read, abs=1e-4)


@pytest.mark.parametrize(("share", "ratio"), [(1.0, 1.64), (0.1, 5.3)])
def test_one_measured_step_without_drafts_tells_what_a_draft_costs(share, ratio):
    """One request, K=7, by the usual shares: 0.15 and weights of 0.62 (of a mixture 5.7 times as many); drafts 0.49."""
    shape = Roofline(share)
    shape.start(1, 1000.0, 0.002)
    assert shape.seconds(1, 1000.0, 7) / shape.seconds(1, 1000.0, OFF) == pytest.approx(ratio, rel=0.03)


TINY = {
    "model_type": "qwen3_moe", "hidden_size": 128, "vocab_size": 1000, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "moe_intermediate_size": 512, "num_experts": 64,
    "num_experts_per_tok": 4, "max_position_embeddings": 512,
}  # fmt: skip
"""A tiny mixture of experts: a token uses a tenth of it."""


def test_a_mixtures_calibration_tells_what_steps_cost_beyond_it():
    """Each further request wakes experts until all are awake, at batches that a calibration hardly reaches."""
    share, arms = active_share(TINY), (0, 1, 3, 7)
    assert share == pytest.approx(0.07, abs=0.01)
    truth = replace(QWEN3_8B_H100, active_share=share, token_s=QWEN3_8B_H100.token_s * share)
    loads = [*((64, 64 * 32, k) for k in (OFF, *arms)), (256, 256 * 32, OFF), (256, 256 * 32, 0)]

    def errors(known):
        model = LatencyModel(arms, table=calibration_of(truth, arms), active_share=known)
        return [abs(model.seconds(b, kv, k) / truth.seconds(b, kv, max(k, 0), k) - 1.0) for b, kv, k in loads]

    assert max(errors(share)) < 0.1, errors(share)
    assert max(errors(1.0)) > 0.5, "as of a dense policy"


def test_a_config_that_does_not_tell_is_taken_to_be_of_a_dense_policy():
    assert active_share(TINY | {"num_experts": 0}) == 1.0 == active_share({"model_type": "other"})
