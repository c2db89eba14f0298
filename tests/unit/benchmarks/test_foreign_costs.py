"""Step costs that are no formula, and what goodput makes of them."""

import dataclasses

import numpy as np
import pytest

from benchmarks.control import foreign
from benchmarks.control.replay import contestants
from benchmarks.simulate.engine import SimulatedEngine
from benchmarks.simulate.hardware import QWEN3_8B_H100
from benchmarks.simulate.oracles import TrueGoodput
from verl_tlt.speculation.types import OFF


def test_each_draft_length_and_octave_is_off_by_a_factor_of_its_own():
    cost = foreign.Distorted(QWEN3_8B_H100, seed=4)
    of = [cost.seconds(b, 900 * b, max(k, 0), k) / QWEN3_8B_H100.seconds(b, 900 * b, max(k, 0), k)
          for k in (OFF, 0, 1, 3, 7) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256)]  # fmt: skip
    assert len(set(np.round(of, 9))) == len(of)
    assert 0.07 < np.std(np.log(of)) < 0.14 and abs(np.mean(np.log(of))) < 0.05
    between = [cost.seconds(b, 900 * b, 3, 3) / QWEN3_8B_H100.seconds(b, 900 * b, 3, 3) for b in (16, 20, 25, 32)]
    assert between == sorted(between) or between == sorted(between, reverse=True)
    change = 0.5 * (cost.seconds(4, 4000, 1, 1) + cost.seconds(4, 4000, 3, 3))
    assert cost.seconds(4, 4000, 1, 3) == pytest.approx(change)


def test_tiles_are_computed_whole():
    cost = foreign.Tiled(QWEN3_8B_H100, 64)
    inside = {cost.seconds(b, 100_000, 7, 7) for b in (33, 36, 40)}
    assert len(inside) == 1 and cost.seconds(41, 100_000, 7, 7) > max(inside)
    assert cost.seconds(64, 0, 0, 0) == QWEN3_8B_H100.seconds(64, 0, 0, 0)


@pytest.mark.parametrize("name", ["study's CPU distorted, calm", "AVX2 CPU distorted, calm"])
def test_goodput_finds_its_way_on_a_distorted_table(monkeypatch, name):
    monkeypatch.setattr(foreign, "SEEDS", (12,))
    (replay,) = [r for r in foreign.replays() if r.name == name]
    replay = dataclasses.replace(replay, workload=dataclasses.replace(replay.workload, rollouts=6))
    engine = SimulatedEngine(replay.workload, replay.cost, replay.noise)
    oracle = engine.run(TrueGoodput(replay.arms)).seconds
    assert 100 * oracle / engine.run(contestants(replay)["goodput"]).seconds > 97.0
