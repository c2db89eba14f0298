"""The shape of step costs: what each coefficient is paid for."""

import pytest

from verl_tlt.speculation.costs.roofline import Roofline
from verl_tlt.speculation.types import OFF

BATCH, KV, SECONDS = 16, 8192.0, 0.020


@pytest.fixture
def usual():
    shape = Roofline()
    shape.start(BATCH, KV, SECONDS)
    return shape


def test_nothing_is_known_before_one_step_was_measured(usual):
    assert usual.ready
    assert not Roofline().ready


def test_without_a_drafter_a_step_pays_no_drafter(usual):
    """OFF pays what stock pays; K=0 the sync on top of it, K=1 the first pass as well, each further draft a pass."""
    off, zero, one, two, three = (usual.part(BATCH, k)[1] for k in (OFF, 0, 1, 2, 3))
    assert off < zero < one < two < three
    assert three - two == pytest.approx(two - one), "passes and requests cost the same each"
    assert usual.part(BATCH, OFF)[0] == usual.part(BATCH, 0)[0], "as many tokens are verified"


def test_verified_tokens_cost_as_they_would_cost_as_requests(usual):
    assert usual.part(4 * BATCH, 0)[0] == pytest.approx(usual.part(BATCH, 3)[0])


def test_a_step_costs_what_its_parts_cost(usual):
    compute, outside = usual.part(BATCH, 3)
    assert usual.seconds(BATCH, KV, 3) == pytest.approx(usual.join(usual.memory(KV), compute, outside))
    assert usual.memory(2 * KV) > usual.memory(KV)


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
