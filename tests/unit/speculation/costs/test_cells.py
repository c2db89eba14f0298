"""A cell's arithmetic: restated against another shape it says the same, and goes on as if it had always been so."""

import math

import pytest

from verl_tlt.speculation.costs.latency import Cell

SAMPLES = (0.30, 0.34, 0.31, 0.33, 0.29, 0.32)


def fed(samples, prior=0.1, cell=None):
    cell = Cell(3, prior, 0.2, 0.03) if cell is None else cell
    for sample in samples:
        cell.learn(sample, 0.0, 0.0)
    return cell


@pytest.mark.parametrize("before", range(7))
@pytest.mark.parametrize("offset", [0.5, -0.25])
def test_a_shift_restates_everything(before, offset):
    cell = fed(SAMPLES[:before])
    cell.shift(offset)
    cell = fed([s + offset for s in SAMPLES[before:]], cell=cell)
    plain = fed(SAMPLES)
    assert (cell.level, cell.prior) == pytest.approx((plain.level + offset, plain.prior + offset))
    assert cell.variance == pytest.approx(plain.variance)


def test_the_centre_is_the_mean_of_the_loads():
    cell = Cell(3, 0.0, math.inf, 0.03)
    for batch, kv in ((2, 100), (4, 300), (9, 500)):
        cell.learn(0.1, 0.0, 0.0)
        cell.place(batch, kv)
    assert (cell.batch, cell.kv_tokens) == pytest.approx((5, 300))


def test_the_first_samples_are_weighed_against_what_the_neighbours_suggest():
    """By the noise of so many: (0.03)^2 of one, a third of it of three that agree, against a prior of (0.2)^2."""
    for count in (1, 3):
        noise, cell = 0.03**2 / count, fed([0.3] * count, prior=0.25)
        trust = 0.2**2 / (0.2**2 + noise)
        assert cell.level == pytest.approx(0.25 + trust * 0.05), count
        assert cell.variance == pytest.approx(trust * noise)
