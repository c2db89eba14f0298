"""The picture shows the data: what is drawn is read back from the axes."""

import dataclasses

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from verl_tlt.report import picture
from verl_tlt.report.lanes import BLUE, GREEN, PURPLE
from verl_tlt.report.reader import TraceError, read_trace
from verl_tlt.report.summary import initial_lengths, rows_of_trace
from verl_tlt.trace.events import TraceWriter


@pytest.fixture
def trace(made_run):
    return read_trace(made_run.directory)


def patches(ax, gid):
    return [p for p in ax.patches if p.get_gid() == gid]


def texts(ax):
    return " | ".join(t.get_text() for t in ax.texts)


def test_lanes_show_decoding_bubble_and_training(trace, made_run):
    ax = Figure().subplots()
    step = 3
    picture.draw_replicas(ax, trace, step)
    idle, rollout = made_run.idle_replica[step], made_run.rollout_s[step]
    names = dict(enumerate(label.get_text().replace("replica ", "replica-") for label in ax.get_yticklabels()))
    (training,) = patches(ax, "training")
    assert names[int(training.get_y())] == idle
    start, end = training.get_x(), training.get_x() + training.get_width()
    assert start == pytest.approx(rollout - made_run.bubble_s[step] + 0.35)
    assert end == pytest.approx(rollout + 0.05)
    assert training.get_hatch()
    decoding = {names[int(p.get_y())]: p.get_width() for p in patches(ax, "decoding")}
    assert decoding[idle] == pytest.approx(rollout - made_run.bubble_s[step], abs=0.2)  # sampled ten times a second
    other = next(n for n in names.values() if n != idle)
    assert decoding[other] == pytest.approx(rollout, abs=0.2)
    assert len(patches(ax, "update_actor")) == 2
    assert f"of a {made_run.bubble_s[step] + 0.06:.1f} s bubble" in texts(ax)
    assert "peak: 32 in flight" in texts(ax)
    assert ax.get_title() == f"RL step 3: {idle.replace('-', ' ')} trained the drafter in its bubble"


def test_the_policy_is_not_trained_on_standalone_replicas(trace):
    run = dataclasses.replace(trace.run, standalone=["replica-1"])
    ax = Figure().subplots()
    picture.draw_replicas(ax, dataclasses.replace(trace, runs=[run]), 3)
    lanes = {int(label.get_position()[1]): label.get_text() for label in ax.get_yticklabels()}
    (update,) = patches(ax, "update_actor")
    assert lanes[int(update.get_y())] == "replica 0"
    assert all(int(text.get_position()[1]) == int(update.get_y()) for text in ax.texts if "update" in text.get_text())


def test_a_bubble_nobody_trained_in_is_drawn_as_idle(trace):
    ax = Figure().subplots()
    picture.draw_replicas(ax, trace, 1)
    assert not patches(ax, "training")
    assert "idle: a bubble of" in texts(ax)


def test_accept_length_and_the_reference(trace, made_run):
    ax = Figure().subplots()
    picture.draw_accept_length(ax, rows_of_trace(trace), initial_lengths(trace))
    lines = {line.get_gid(): line for line in ax.lines}
    assert lines["accept_length"].get_xdata().tolist() == list(range(1, 7))
    assert lines["accept_length"].get_ydata().tolist() == pytest.approx(list(made_run.accept_length.values()))
    assert set(lines["initial"].get_ydata()) == {1.01}, "as the gate measured it"
    assert "(tokens per verified draft)" in ax.get_ylabel()


def test_a_run_without_loads_or_engine_steps_is_drawn(tmp_path):
    TraceWriter(tmp_path, "driver").emit("phase", step=1, name="rollout", start=0.0, end=2.0)
    picture.save_png(picture.main_figure(read_trace(tmp_path), []), tmp_path / "bare.png")


def test_a_trace_without_a_rollout_says_so(tmp_path):
    TraceWriter(tmp_path, "driver").emit("run", step0=1)
    with pytest.raises(TraceError, match="no finished rollout"):
        picture.main_figure(read_trace(tmp_path), [])


def test_png_is_written_in_colour(trace, tmp_path):
    path = picture.save_png(picture.main_figure(trace, rows_of_trace(trace)), tmp_path / "p.png")
    image = imread(path)
    assert image.shape[0] > 800 and image.shape[1] > 1500
    rgb = (image[..., :3] * 255).round().astype(int).reshape(-1, 3)
    for color in (BLUE, GREEN, PURPLE, picture.LIGHT_BLUE):
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (rgb == wanted).all(axis=1).sum() > 1000
