"""The fitted roofline: it rises with its inputs, and a fit finds what was measured."""

import pytest

from verl_tlt.speculation.costs.roofline import Roofline
from verl_tlt.speculation.types import OFF

BATCH, KV, SECONDS = 16, 8192.0, 0.020


@pytest.fixture
def usual():
    shape = Roofline()
    shape.start(BATCH, KV, SECONDS)
    return shape


def test_every_further_part_of_a_step_costs_more(usual):
    """OFF has no drafter, K=0 its pass, K=1 a draft token, each further one a pass more."""
    by_length = [usual.seconds(BATCH, KV, k) for k in (OFF, 0, 1, 2, 3)]
    by_batch = [usual.seconds(batch, KV, 3) for batch in (1, 4, 16, 64)]
    by_context = [usual.seconds(BATCH, kv, 3) for kv in (KV / 2, KV, 2 * KV)]
    assert all(costs == sorted(set(costs)) for costs in (by_length, by_batch, by_context))
    assert usual.ready and not Roofline().ready


def test_the_usual_shape_is_about_the_step_it_was_told(usual):
    assert usual.seconds(BATCH, KV, 0) == pytest.approx(SECONDS, rel=0.25)


def test_a_fit_finds_the_sync_that_off_does_not_pay(usual):
    """Off by the usual share at first: steps without a drafter take 30 % less than those at K=0."""
    rows = [(batch, 100.0 * batch, k) for batch in (1, 4, 16, 64) for k in (OFF, 0, 1, 3)]
    truth = [(0.7 if k == OFF else 1.0) * SECONDS + max(k, 0) * 0.002 for _, _, k in rows]
    usual.fit(rows, truth, [16.0] * len(rows), 20)
    found = {k: usual.seconds(16, 1600.0, k) for k in (OFF, 0, 1, 3)}
    assert found[OFF] / found[0] == pytest.approx(0.7, abs=0.08)
    assert found[3] > found[1] > found[0]


ROWS = [(batch, 100.0 * batch, k) for batch in (1, 4, 16, 64, 256) for k in (OFF, 0, 1, 3, 7)]


def test_a_stall_among_the_measured_hardly_moves_the_fit(usual):
    truth = [SECONDS * (1 + batch * (max(k, 0) + 1) / 400) for batch, _, k in ROWS]
    stalled = [8 * seconds if row == (16, 1600.0, 3) else seconds for row, seconds in zip(ROWS, truth, strict=True)]
    found = []
    for measured in (truth, stalled):
        shape = Roofline()
        shape.start(BATCH, KV, SECONDS)
        shape.fit(ROWS, measured, [16.0] * len(ROWS), 30)
        found.append([shape.seconds(*row) for row in ROWS])
    assert found[1] == pytest.approx(found[0], rel=0.03)
