"""The picture of a step: what is drawn is read back from the paths and compared with the records."""

import dataclasses
import re

import numpy as np
import pytest

from verl_tlt.report.lanes import LEFT, PLOT, columns_for, draw_lanes, k_color, lanes_of, runs, skyline
from verl_tlt.report.reader import read_trace
from verl_tlt.report.steps import rl_steps


@pytest.fixture(scope="module")
def trace(made_run):
    return read_trace(made_run.directory)


def paths(drawing, kind):
    return [path.get("d") for path in drawing.iter("path") if path.get("class") == kind]


def boxes(path):
    """Left edge, width and top of the rectangles of a path."""
    return [tuple(map(int, m)) for m in re.findall(r"M(\d+) (\d+)h(\d+)v", path)]


def test_lanes_hold_batch_and_draft_length_of_every_replica(trace):
    step = rl_steps(trace)[6]
    lanes = lanes_of(trace, step, 400)
    assert [lane.label for lane in lanes] == ["replica 0", "replica 1"]
    at = step.start + (np.arange(400) + 0.5) / 400 * (step.finish - step.start)
    for lane in lanes:
        engine = trace.engine(lane.replica)
        rows = list(zip(engine.t, engine.latency_s, engine.batch, engine.k, strict=True))
        for column, moment in enumerate(at):
            running = [(batch, k) for t, latency, batch, k in rows if t - latency < moment <= t]
            if running and moment < step.end:
                assert (lane.batch[column], lane.k[column]) == running[0]
        assert {1, 3, 5} <= set(lane.k.tolist()), "K rises as the batch falls"


def test_an_engine_is_found_by_its_number(trace):
    numbered = {name.removeprefix("replica-"): steps for name, steps in trace.engines.items()}
    renamed = dataclasses.replace(trace, engines=numbered)
    assert renamed.engine("replica-1") is numbered["1"]
    assert dataclasses.replace(trace, engines={}).engine("replica-1") is None


def test_without_engine_steps_the_load_is_what_the_balancer_saw(trace):
    step = rl_steps(trace)[2]
    bare = dataclasses.replace(trace, engines={})
    (lane, _) = lanes_of(bare, step, 300)
    assert lane.batch.max() == 32 and not lane.k.size
    text = " ".join(draw_lanes(bare, step, lanes_of(bare, step, 300)).itertext())
    assert "requests in flight, full height: 32" in text and "K =" not in text


def test_draft_lengths_are_drawn_where_they_were_chosen(trace):
    step = rl_steps(trace)[6]
    lanes = lanes_of(trace, step, PLOT)
    drawing = draw_lanes(trace, step, lanes)
    for k in (1, 3, 5):
        (path,) = paths(drawing, f"k{k}")
        drawn = sum(width for _, _, width in boxes(path))
        assert drawn == sum(int((lane.k == k).sum()) for lane in lanes), f"pixels with K = {k}"
    assert "K = 5" in " ".join(drawing.itertext())


def test_training_is_drawn_where_it_was(trace, made_run):
    step = rl_steps(trace)[3]
    drawing = draw_lanes(trace, step, lanes_of(trace, step, 200))
    (training,) = paths(drawing, "training")
    ((x, _, width),) = boxes(training)
    per_second = PLOT / (step.finish - step.start)
    idle_from = made_run.rollout_s[3] - made_run.bubble_s[3]
    assert x == pytest.approx(LEFT + (idle_from + 0.35) * per_second, abs=1)
    assert width == pytest.approx((made_run.bubble_s[3] - 0.35 + 0.05) * per_second, abs=1.5)
    text = " ".join(drawing.itertext())
    assert f"bubble {made_run.bubble_s[3] + 0.06:.1f} s, {made_run.bubble_s[3] - 0.30:.1f} trained" in text


def test_the_policy_is_not_trained_on_standalone_replicas(trace):
    step = rl_steps(trace)[3]
    run = dataclasses.replace(trace.run, standalone=["replica-1"])
    lanes = lanes_of(trace, step, 200)
    (both,) = paths(draw_lanes(trace, step, lanes), "update_actor")
    (one,) = paths(draw_lanes(dataclasses.replace(trace, runs=[run]), step, lanes), "update_actor")
    assert len(boxes(both)) == 2 and boxes(one) == boxes(both)[:1]


def test_bars_side_by_side():
    assert runs(np.array([3, 3, 0, 5])) == [(0, 2, 3), (2, 3, 0), (3, 4, 5)]
    assert skyline(np.array([3, 3, 0, 5]), 10, 40, 100) == "M10 100v-3h20v3h10v-5h10V100z"
    assert skyline(np.zeros(4, dtype=int), 10, 40, 100) == ""


def test_a_long_run_of_many_replicas_is_drawn_coarser():
    assert columns_for(2 * 10) == PLOT
    assert 100 <= columns_for(64 * 500) < 200
    assert len({k_color(k, 7) for k in range(-1, 8)}) == 9, "every draft length has a colour of its own"
