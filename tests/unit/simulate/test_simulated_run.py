"""Whole simulated runs: repeatable, the drafter learns where there are bubbles, and wrong inputs are a sentence."""

import math
from dataclasses import replace

import numpy as np
import pytest

from verl_tlt.simulate.costs import QWEN3_8B_H100
from verl_tlt.simulate.idle_time import Spot, harvest
from verl_tlt.simulate.replica import EngineSpec
from verl_tlt.simulate.run import Drafter, Rest, Scenario, simulate, total_ratios
from verl_tlt.simulate.workload import LogNormal, Recorded, SimulationError, from_moments

GOOD = (0.8, 0.75, 0.7)
RUN = Scenario(
    EngineSpec(QWEN3_8B_H100),
    replicas=4,
    requests=64,
    lengths=LogNormal(800, 1.0, 8192),
    drafter=Drafter(GOOD),
    rest=Rest(fixed_s=10.0),
    steps=2,
)


def test_the_result_does_not_depend_on_the_number_of_processes():
    assert simulate(RUN) == simulate(RUN, jobs=2)
    assert simulate(RUN) != simulate(replace(RUN, seed=1))


def test_amdahl():
    results = simulate(RUN)
    rollout, step = total_ratios(results)
    assert rollout > 1.5
    share = sum(r.stock_rollout_s for r in results) / sum(r.stock_step_s for r in results)
    assert step == pytest.approx(1.0 / (1.0 - share + share / rollout))
    assert total_ratios(simulate(replace(RUN, overhead_s=5.0)))[1] < step


def test_a_drafter_learns_in_bubbles_and_wakes_up():
    learning = Drafter((0.02, 0.02, 0.02), GOOD, tokens=4e4)
    results = simulate(replace(RUN, drafter=learning, spot=Spot(tokens_per_s=20_000), steps=5))
    assert results[0].drafting == 0 and results[0].rollout_ratio == pytest.approx(1.0)
    assert results[0].used_s == 0.0 and results[1].used_s > 0.0, "a buffer is empty in the first step"
    assert results[-1].drafting == 4 and results[-1].rollout_ratio > 1.3
    assert results[2].learned == 0.0 < results[3].learned, "trained in step 2, scored in 3, served in 4"
    assert [r.learned for r in results] == sorted(r.learned for r in results)
    faded = simulate(replace(RUN, drafter=replace(learning, fade=0.5), spot=Spot(tokens_per_s=20_000), steps=5))
    assert faded[-1].learned < results[-1].learned


def test_one_replica_has_no_bubble():
    learning = Drafter((0.02, 0.02, 0.02), GOOD, tokens=1e3)
    results = simulate(replace(RUN, replicas=1, drafter=learning, spot=Spot(tokens_per_s=20_000), steps=3))
    assert all(r.bubble_s == r.learned == r.drafting == 0 for r in results)


def test_bubbles_are_used_as_the_planner_allows():
    spot = Spot(tokens_per_s=100, begin_s=2.0, settle_s=0.5, least_tokens=500, most_tokens=1500)
    account, tokens = harvest(spot, [10.0, 16.0, 26.5, 30.0], [8, 8, 8, 8], ready=True)
    assert account.bubble_s == pytest.approx({"0": 20.0, "1": 14.0, "2": 3.5, "3": 0.0})
    assert account.used_s == pytest.approx({"0": 17.5, "1": 11.5, "2": 1.0, "3": 0.0})
    assert tokens == pytest.approx(1500 + 1150), "one session ran out of epochs, one was stopped, one was too short"
    assert harvest(spot, [10.0, 30.0], [8, 8], ready=False)[1] == 0
    assert harvest(spot, [10.0, 30.0], [1, 8], ready=True)[1] == 0, "it carried less than half its share"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replicas": 0}, "at least one replica"),
        ({"requests": 3}, "a request for every replica"),
        ({"drafter": Drafter((0.5,))}, "3 draft positions"),
    ],
)
def test_a_run_that_cannot_be_is_one_sentence(change, said):
    with pytest.raises(SimulationError, match=said):
        replace(RUN, **change)


def test_inputs_that_cannot_be_are_one_sentence():
    for wrong in (lambda: Drafter((1.5,)), lambda: Drafter((0.5,), (0.6, 0.6)), lambda: LogNormal(-1, 1, 10),
                  lambda: Recorded(()), lambda: from_moments(900, 800, 0.0, 10, 512)):  # fmt: skip
        with pytest.raises(SimulationError):
            wrong()


@pytest.mark.parametrize(("median", "sigma"), [(1000, 0.5), (2000, 1.1)])
def test_lengths_are_recovered_from_what_verl_logs(median, sigma):
    drawn = LogNormal(median, sigma, 8192).draw(np.random.default_rng(0), 200_000)
    clipped = float((drawn == 8192).mean())
    found = from_moments(float(drawn.mean()), float(drawn.max()), clipped, drawn.size, 8192)
    again = found.draw(np.random.default_rng(1), 200_000)
    assert again.mean() == pytest.approx(drawn.mean(), rel=0.03)
    assert np.quantile(again, 0.95) == pytest.approx(np.quantile(drawn, 0.95), rel=0.15)
    assert math.isclose(found.longest, 8192)


def test_recorded_lengths_are_drawn_again():
    drawn = Recorded((5, 7)).draw(np.random.default_rng(0), 100)
    assert set(drawn.tolist()) == {5, 7}
