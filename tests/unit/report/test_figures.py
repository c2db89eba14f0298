"""The charts show the data: what is drawn is read back from the axes."""

import dataclasses

import matplotlib
import pytest
from matplotlib.figure import Figure

from verl_tlt.commands.charts import Series, draw_bars, draw_lines
from verl_tlt.commands.report import figures
from verl_tlt.commands.report.reader import read_trace
from verl_tlt.commands.report.timeline import rl_steps


@pytest.fixture
def trace(made_run):
    return read_trace(made_run.directory)


@pytest.fixture
def ax():
    return Figure().subplots()


def boxes(ax, label):
    """(left, right, name of the lane) of each box that was drawn under this label."""
    lanes = {int(label.get_position()[1]): label.get_text() for label in ax.get_yticklabels()}
    extents = [path.get_extents() for c in ax.collections if c.get_label() == label for path in c.get_paths()]
    return [(box.x0, box.x1, lanes[int(box.y0)]) for box in extents]


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []


def test_lanes_show_training_and_phases(trace, made_run, ax):
    figures.draw_replicas(ax, trace, rl_steps(trace)[3])
    rollout, idle = made_run.rollout_s[3], made_run.bubble_s[3]
    ((start, end, lane),) = boxes(ax, "training the drafter")
    assert lane == made_run.idle_replica[3].replace("-", " ")
    assert (start, end) == pytest.approx((rollout - idle + 0.35, rollout + 0.05))
    assert len(boxes(ax, "policy update")) == 2


def test_the_policy_is_not_trained_on_standalone_replicas(trace, ax):
    run = dataclasses.replace(trace.run, standalone=["replica-1"])
    figures.draw_replicas(ax, dataclasses.replace(trace, runs=[run]), rl_steps(trace)[3])
    assert [lane for _, _, lane in boxes(ax, "policy update")] == ["replica 0"]


def test_lanes_show_batch_and_draft_length(trace, ax):
    figures.draw_replicas(ax, trace, rl_steps(trace)[6])
    legend = legend_of(ax)
    assert legend[0] == "batch, up to 32 requests" and {"K=1", "K=3", "K=5"} <= set(legend)
    upper = max(ax.patches, key=lambda patch: patch.get_data().baseline)
    assert upper.get_data().values.max() == pytest.approx(1 + figures.LANE)
    drawn = {matplotlib.colors.to_hex(color) for color in ax.images[0].get_array()[0]}
    assert {figures.k_color(k, 5) for k in (1, 3, 5)} <= drawn


def test_every_legend_entry_is_drawn(ax):
    lines = [
        Series("all", "#000000", {1: 2.0, 2: None, 3: 2.5}),
        Series("one point", "#111111", {3: 1.0}),
        Series("none", "#222222", {1: None}),
    ]
    draw_lines(ax, "tokens", lines, lowest=1.0)
    assert legend_of(ax) == ["all", "one point"]
    assert all(line.get_marker() == "." for line in ax.get_lines()), "a single point can be seen"
    bars = Figure().subplots()
    draw_bars(bars, "seconds", [Series("up", "g", {1: 2.0, 2: 1.0}), Series("down", "r", {1: -1.0}),
                                Series("nothing", "b", {1: 0.0, 2: None})])  # fmt: skip
    assert legend_of(bars) == ["up", "down"]


def test_bars_are_stacked_on_their_own_side_of_the_axis(ax):
    draw_bars(
        ax, "seconds", [Series("a", "g", {1: 2.0, 4: 1.0}), Series("b", "b", {1: 3.0}), Series("c", "r", {1: -1})]
    )
    a, b, c = (patch.get_data() for patch in ax.patches)
    assert (a.values[0], b.baseline[0], b.values[0], c.values[0]) == (2.0, 2.0, 5.0, -1.0)
    assert a.edges.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5] and a.values.tolist() == [2.0, 0.0, 0.0, 1.0]


def test_a_long_run_is_drawn_in_seconds(trace):
    """Not a patch for each step: 5,000 steps would take minutes."""
    many = {n: trace.steps[1 + n % 6] for n in range(1, 5001)}
    for chart in figures.run_charts(dataclasses.replace(trace, steps=many)):
        assert len(chart.svg()) > 1000
