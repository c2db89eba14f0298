"""The charts show the data: what is drawn is read back from the axes."""

import dataclasses

import matplotlib
import pytest
from made_run import make_run
from matplotlib.figure import Figure
from matplotlib.image import imread

from verl_tlt.commands.report import figures
from verl_tlt.commands.report.reader import read_trace
from verl_tlt.commands.report.steps import rl_steps
from verl_tlt.trace.events import TraceWriter


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


def test_lanes_show_training_and_phases(trace, made_run, ax):
    figures.draw_replicas(ax, trace, rl_steps(trace)[3])
    rollout, bubble = made_run.rollout_s[3], made_run.bubble_s[3]
    ((start, end, lane),) = boxes(ax, "training")
    assert lane == made_run.idle_replica[3].replace("-", " ")
    assert (start, end) == pytest.approx((rollout - bubble + 0.35, rollout + 0.05))
    assert len(boxes(ax, "policy update")) == 2


def test_the_policy_is_not_trained_on_standalone_replicas(trace, ax):
    run = dataclasses.replace(trace.run, standalone=["replica-1"])
    figures.draw_replicas(ax, dataclasses.replace(trace, runs=[run]), rl_steps(trace)[3])
    assert [lane for _, _, lane in boxes(ax, "policy update")] == ["replica 0"]


def test_lanes_show_batch_and_draft_length(trace, ax):
    figures.draw_replicas(ax, trace, rl_steps(trace)[6])
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend[0] == "batch, up to 32" and {"K=1", "K=3", "K=5"} <= set(legend)
    upper = max(ax.patches, key=lambda patch: patch.get_data().baseline)
    assert upper.get_data().values.max() == pytest.approx(1 + figures.LANE)
    drawn = {matplotlib.colors.to_hex(color) for color in ax.images[0].get_array()[0]}
    assert {figures.k_color(k, 5) for k in (1, 3, 5)} <= drawn


def test_accept_length_and_the_first_drafter(trace, made_run, ax):
    figures.draw_lines(ax, "tokens", figures.accept_lengths(trace), lowest=1.0)
    ours, first = ax.lines
    assert ours.get_xdata().tolist() == list(range(1, 7))
    assert ours.get_ydata().tolist() == pytest.approx(list(made_run.accept_length.values()))
    assert set(first.get_ydata()) == {1.01} and first.get_linestyle() == "--"
    assert ax.get_ylim()[0] == 1.0, "a small change does not look like a large one"


def test_speed_is_drawn_beside_what_it_would_be_without_drafts(trace, made_run, ax):
    """The seconds that the account says were saved are added to the rollout's, in a rollout without drafts none."""
    figures.draw_lines(ax, "tokens per second", figures.speeds(trace), lowest=0.0)
    ours, plain = ax.lines
    assert plain.get_linestyle() == "--" and ours.get_xdata().tolist() == list(range(1, 7))
    for step, (mine, without) in enumerate(zip(ours.get_ydata(), plain.get_ydata(), strict=True), 1):
        rollout_s, saved_s = made_run.rollout_s[step], made_run.saved_s[step]
        assert without == pytest.approx(mine * rollout_s / (rollout_s + saved_s), rel=0.01), step
    unknown = {n: {k: v for k, v in m.items() if k != "tlt/saved_s"} for n, m in trace.steps.items()}
    assert list(figures.speeds(dataclasses.replace(trace, steps=unknown))) == ["this run"]


def test_draft_lengths_are_shares_of_engine_steps(trace):
    bars = figures.draft_lengths(trace)
    assert set(bars) <= {"OFF", *(f"K={k}" for k in range(6))}
    columns = zip(*(values for _, values in bars.values()), strict=True)
    assert [sum(column) for column in columns] == pytest.approx([1] * 6)


def test_a_draft_length_has_one_colour_of_its_own_in_all_charts(trace, ax):
    assert len({figures.k_color(k, 7) for k in range(-2, 8)}) == 10
    longer = {n: {**metrics, "tlt/draft_length_frac_7": 0.5} for n, metrics in trace.steps.items()}  # not in this step
    trace = dataclasses.replace(trace, steps=longer)
    figures.draw_replicas(ax, trace, rl_steps(trace)[6])
    bars, legend = figures.draft_lengths(trace), ax.get_legend()
    handles = {t.get_text(): h.get_facecolor() for t, h in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    both = set(handles) & set(bars)
    assert both and all(matplotlib.colors.to_hex(handles[label]) == bars[label][0] for label in both)


@pytest.mark.timeout(15)
def test_bars_are_one_shape_however_many_steps_there_are(ax):
    steps = range(1, 50_001)
    figures.draw_bars(ax, "s", steps, {"up": ("red", [1.0] * len(steps)), "down": ("green", [-2.0] * len(steps))})
    assert [patch.get_path().get_extents().extents.tolist() for patch in ax.patches] == [
        [0.5, 0.0, 50_000.5, 1.0], [0.5, -2.0, 50_000.5, 0.0],
    ]  # fmt: skip
    assert ax.get_ylim()[0] < -2.0 and ax.get_ylim()[1] > 1.0


def test_the_picture_is_drawn(trace, tmp_path):
    image = imread(figures.save_picture(tmp_path / "p.png", trace))
    assert image.shape[0] > 1500 and image.shape[1] == 160 * figures.WIDTH, "a column, for a page of 390 pixels"
    rgb = (image[..., :3] * 255).round().astype(int).reshape(-1, 3)
    for color in (figures.BLUE, figures.GREEN, figures.PURPLE, figures.PALE):
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (rgb == wanted).all(axis=1).sum() > 1000
    TraceWriter(tmp_path, "trainer").emit("phase", step=1, name="rollout", start=0.0, end=2.0)
    figures.save_picture(tmp_path / "bare.png", read_trace(tmp_path))  # without loads and engine steps


@pytest.mark.parametrize("replicas", [2, 8, 20])
def test_nothing_is_cut_and_no_legend_covers_the_data(tmp_path, monkeypatch, replicas):
    rooms, pixels = [], []

    def look(figure, *args, **kwargs):
        figure.draw_without_rendering()
        drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        rooms.append(min(drawn.x0, drawn.y0, width - drawn.x1, height - drawn.y1))
        pixels.append(358 / width * matplotlib.rcParams["font.size"] / 72)
        assert all(ax.get_legend().get_window_extent().y0 >= ax.bbox.y1 - 1 for ax in figure.axes if ax.get_legend())

    monkeypatch.setattr(Figure, "savefig", look)
    run = read_trace(make_run(tmp_path / "run", steps=4, replicas=replicas).directory)
    charts = [*figures.run_charts(run), *(figures.step_chart(run, step) for step in rl_steps(run).values())]
    for chart in charts:
        chart.svg()
    assert len(rooms) == len(charts)
    assert min(rooms) > 0.1, "inches: the font of a browser may be wider"
    assert min(pixels) > 10, "height of a text on a page of 390"
    figures.save_picture(tmp_path / "picture.png", run)
    assert rooms[-1] >= 0 and pixels[-1] > 10
