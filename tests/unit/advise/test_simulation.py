"""Simulated runs: repeatable, and wrong inputs are a sentence."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulate.hardware import QWEN3_8B_H100, steady
from verl_tlt.advise.decoding import EngineSpec
from verl_tlt.advise.response_lengths import LogNormal, from_mean, from_moments
from verl_tlt.advise.simulation import SimulatedRun, simulate
from verl_tlt.errors import TLTError

RUN = SimulatedRun(
    EngineSpec(steady(QWEN3_8B_H100)), replicas=4, requests=64, lengths=LogNormal(800, 1.0, 8192),
    acceptance=(0.8, 0.75, 0.7), steps=2,
)  # fmt: skip


def test_the_same_seed_gives_the_same_result():
    assert simulate(RUN) == simulate(RUN) != simulate(replace(RUN, seed=1))


def test_a_good_drafter_is_faster_and_a_useless_one_as_fast_as_stock():
    good, useless = simulate(RUN), simulate(replace(RUN, acceptance=(0.02, 0.02, 0.02)))
    assert good.speed > 1.5 and useless.speed == pytest.approx(1.0)
    assert good.stock_s == useless.stock_s and good.tokens == useless.tokens
    assert 0.0 < good.tail_share <= 1.0


def test_one_replica_alone_has_no_bubble():
    assert simulate(RUN).bubble_share > 0.1
    assert simulate(replace(RUN, replicas=1)).bubble_share == pytest.approx(0.0)


def test_inputs_that_cannot_be_are_one_sentence():
    with pytest.raises(TLTError, match="median > 0"):
        LogNormal(-1, 1, 10)
    with pytest.raises(TLTError, match="900 does not fit a limit of 512"):
        from_moments(900, 800, 0.0, 10, 512)


@pytest.mark.parametrize(("median", "sigma"), [(1000, 0.5), (2000, 1.1)])
def test_lengths_are_recovered_from_what_verl_logs(median, sigma):
    drawn = LogNormal(median, sigma, 8192).draw(np.random.default_rng(0), 200_000)
    clipped = float((drawn == 8192).mean())
    found = from_moments(float(drawn.mean()), float(drawn.max()), clipped, drawn.size, 8192)
    again = found.draw(np.random.default_rng(1), 200_000)
    assert again.mean() == pytest.approx(drawn.mean(), rel=0.03) == found.mean()
    assert np.quantile(again, 0.95) == pytest.approx(np.quantile(drawn, 0.95), rel=0.15)
    assert from_mean(found.mean(), found.sigma, 8192).median == pytest.approx(found.median, rel=1e-3)
