"""Draws a traced run with matplotlib: the charts of the page, and `picture.png`."""

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from verl_tlt.commands.report import steps as run_steps
from verl_tlt.commands.report.reader import RunTrace
from verl_tlt.files.disk import replacing

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, SKY, ORANGE, GREEN, PURPLE, RED = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
PALE, GREY, INK = "#EEEEEE", "#888888", "#222222"
TRAINING: dict[str, Any] = {"facecolor": "#FBE3B0", "edgecolor": ORANGE, "hatch": "///"}
PHASES = {
    "reward": ("reward model", SKY),
    "old_log_prob": ("log-probs", PURPLE),
    "update_actor": ("policy update", GREEN),
    "update_weights": ("weight sync", "#F0E442"),
}
"""Phases on the policy's devices after the rollout: name in the charts, colour."""
STYLE = {
    "text.usetex": False,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.0,
}
WIDTH = 5.0
"""Inches of a chart of the page: its texts are 11 pixels high where the page is 390 wide."""
MARGIN = 0.12
"""Inches around a chart: a browser without the font takes one that may be a little wider."""
COLUMNS = 600
"""Number of times at which a replica's lane is sampled."""
MOST_LANES = 64
"""Most replicas in a chart; of more, the first are drawn."""
LANE, STRIP = 0.84, 0.26
"""Height of a lane and of the draft lengths at its bottom, as a share of the distance between lanes."""

Points = Mapping[int, float | None]
"""Values by RL step; None leaves a gap."""


@dataclass(frozen=True)
class Chart:
    """A chart of the page, with a note on how to read it."""

    title: str
    note: str
    draw: Callable[[Axes], None]
    height: float = 3.2
    """Height in inches, on the page."""

    def svg(self) -> str:
        """The chart as SVG, in base64."""
        with matplotlib.rc_context(STYLE), io.BytesIO() as file:
            layout = ConstrainedLayoutEngine(w_pad=MARGIN, h_pad=MARGIN)
            figure = Figure(figsize=(WIDTH, self.height), layout=layout)
            self.draw(figure.add_subplot())
            figure.savefig(file, format="svg")
            return base64.b64encode(file.getvalue()).decode()


def run_charts(trace: RunTrace) -> Iterator[Chart]:
    """The charts over RL steps; one without a value is left out."""
    rows_by_step = run_steps.rows_of_trace(trace)
    steps, rows = list(rows_by_step), list(rows_by_step.values())
    saved = [row["saved_s"] or 0.0 for row in rows]
    if any(row["saved_s"] is not None for row in rows):
        bars = {
            "saved": (GREEN, [max(0.0, s) for s in saved]),
            "lost": (RED, [min(0.0, s) for s in saved]),
            "TLT's own work": (ORANGE, [-run_steps.own_work_s(row) for row in rows]),
        }
        note = "Seconds by which rollouts with drafts ended earlier than without drafts, estimated from measured costs."
        yield Chart("Savings", note, partial(draw_bars, unit="seconds", steps=steps, bars=bars))
    plain = "Dashed: what the same rollouts reach without drafts, by TLT's own account."
    for title, unit, note, lines, lowest in (
        ("Accept length", "tokens per draft", "Tokens per verified draft.", accept_lengths(trace), 1.0),
        ("Speed of the rollout", "tokens per second", plain, speeds(trace), 0.0),
        ("Reward", "reward", "Mean reward.", {"": (BLUE, {n: r["reward"] for n, r in rows_by_step.items()})}, None),
    ):
        if any(value is not None for _, points in lines.values() for value in points.values()):
            yield Chart(title, note, partial(draw_lines, unit=unit, lines=lines, lowest=lowest))
    if lengths := draft_lengths(trace):
        note = "Share of engine steps. OFF: the drafter's pass was skipped; K=0: nothing was drafted in the step."
        yield Chart("Draft length K", note, partial(draw_bars, unit="share of engine steps", steps=steps, bars=lengths))
    if any(row["bubble_s"] for row in rows):
        trained = [row["bubble_trained_s"] or 0.0 for row in rows]
        idle = [(row["bubble_s"] or 0.0) - used for row, used in zip(rows, trained, strict=True)]
        bars = {"training the drafter": (ORANGE, trained), "idle": ("#CCCCCC", idle)}
        note = "Seconds in which replicas had nothing to decode, summed over replicas."
        yield Chart("Bubbles", note, partial(draw_bars, unit="seconds", steps=steps, bars=bars))


def step_chart(trace: RunTrace, step: run_steps.RLStep) -> Chart:
    count = max(1, min(MOST_LANES, len(trace.replicas)))
    note = "Upper part of a lane: batch, or requests in flight where engine steps were not traced; lower part: K."
    if len(trace.replicas) > MOST_LANES:
        note += f" The first {MOST_LANES} of {len(trace.replicas)} replicas."
    draw, lane = partial(draw_replicas, trace=trace, step=step), min(1.0, max(0.3, 5 / count))
    return Chart(f"RL step {step.step}: the replicas over time", note, draw, 2.2 + count * lane)


def save_picture(path: Path, trace: RunTrace) -> Path:
    """Write a PNG of one column: speed, accept length, draft lengths, and the replicas in the most trained step."""
    steps = run_steps.rl_steps(trace)
    known = {chart.title: chart for chart in run_charts(trace)}
    charts = [known[title] for title in ("Speed of the rollout", "Accept length", "Draft length K") if title in known]
    charts.append(step_chart(trace, steps[run_steps.most_trained(steps)]))
    heights = [chart.height for chart in charts]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        parts = figure.subfigures(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part, chart in zip(parts, charts, strict=True):
            part.suptitle(chart.title, fontweight="bold", x=0.02, ha="left")
            chart.draw(part.add_subplot())
        with replacing(path) as file:
            figure.savefig(file, format="png", dpi=160, facecolor="white")
    return path


def draw_replicas(ax: Axes, trace: RunTrace, step: run_steps.RLStep) -> None:
    """A lane for each replica over one RL step: its batch and K, its sessions, and the policy's phases after it."""
    names = trace.replicas[:MOST_LANES]
    edges = np.linspace(step.start, step.finish, COLUMNS + 1)
    lanes = [run_steps.sampled(trace, step, name, (edges[:-1] + edges[1:]) / 2) for name in names]
    most = max([1, *(int(batch.max()) for batch, _ in lanes)])
    ks = sorted({value for _, k in lanes for value in k.tolist()})
    longest = max([1, *ks, *_draft_length_metrics(trace)])  # of the run: a K has one colour in all charts
    colors = {k: k_color(k, longest) for k in ks}
    seconds = edges - step.start
    for y, name, (batch, k) in zip(range(len(names))[::-1], names, lanes, strict=True):
        ax.broken_barh([(0.0, step.end - step.start)], (y, LANE), color=PALE, linewidth=0, label="nothing to decode")
        change = np.flatnonzero(np.diff(batch, prepend=-1))
        height = y + STRIP + (LANE - STRIP) * batch[change] / most
        ax.stairs(height, [*seconds[change], seconds[-1]], baseline=y + STRIP, fill=True, color=BLUE)
        strip = np.array([[to_rgba(colors[value]) for value in k.tolist()]])  # [1, columns, RGBA]
        ax.imshow(strip, extent=(0.0, seconds[-1], y, y + STRIP), aspect="auto", interpolation="nearest", zorder=2)
        _draw_work(ax, trace, step, name, y)
    ax.axvline(step.end - step.start, color=INK, linewidth=1, linestyle="--")
    ax.set_yticks([y + LANE / 2 for y in range(len(names))], [trace.label(n) for n in reversed(names)])
    ax.set_xlim(0, seconds[-1])
    ax.set_ylim(-0.1, len(names))
    ax.set_xlabel(f"seconds (rollout: {step.end - step.start:.1f} s)")
    legend = {f"batch, up to {most}": Patch(color=BLUE)}
    legend |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    legend |= {k_name(k): Patch(color=color) for k, color in colors.items() if k != run_steps.NO_STEP}
    columns = int(ax.figure.bbox.width / ax.figure.dpi / 2.5)
    ax.legend(legend.values(), legend.keys(), loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)


def _draw_work(ax: Axes, trace: RunTrace, step: run_steps.RLStep, replica: str, y: int) -> None:
    """The replica's sessions, and the policy's phases unless the replica is standalone."""
    sessions = [(s.start - step.start, s.end - s.start) for s in step.sessions if s.replica == replica]
    if sessions:
        ax.broken_barh(sessions, (y, LANE), linewidth=1, label="training", **TRAINING)
    if trace.run and replica in trace.run.standalone:
        return
    for phase in (p for p in step.after if p.name in PHASES):
        label, color = PHASES[phase.name]
        span = (phase.start - step.start, phase.end - phase.start)
        ax.broken_barh([span], (y, LANE), color=color, linewidth=0, label=label)


def draw_lines(ax: Axes, unit: str, lines: Mapping[str, tuple[str, Points]], lowest: float | None = None) -> None:
    """Lines over RL steps: label to colour and points; a grey line is dashed. `lowest`: where the axis begins."""
    for label, (color, points) in lines.items():
        values = [np.nan if value is None else value for value in points.values()]
        ax.plot(list(points), values, "--" if color == GREY else ".-", color=color, label=label)
    if lowest is not None:
        ax.set_ylim(bottom=lowest, top=max(ax.get_ylim()[1], lowest + 0.1))
    _finish(ax, unit)


def draw_bars(ax: Axes, unit: str, steps: Sequence[int], bars: Mapping[str, tuple[str, Sequence[float]]]) -> None:
    """Stacked bars over RL steps, negative values below the axis: label to colour and values."""
    up, down = np.zeros(len(steps)), np.zeros(len(steps))
    at, half = np.array(steps), 0.425 if len(steps) < 60 else 0.5
    for label, (color, values) in bars.items():
        heights = np.array(values)
        bottom = np.where(heights < 0, down, up)
        x, y = (at - half, at - half, at + half, at + half), (bottom, bottom + heights, bottom + heights, bottom)
        corners = np.array([x, y]).transpose(2, 1, 0)  # [steps, corners, 2]
        outline = Outline.make_compound_path_from_polys(corners)  # a patch for each step would take minutes
        ax.add_artist(PathPatch(outline, color=color, linewidth=0, label=label))
        ax.update_datalim(corners.reshape(-1, 2))
        up, down = up + np.maximum(heights, 0.0), down + np.minimum(heights, 0.0)
    ax.autoscale_view()
    ax.axhline(0, color=GREY, linewidth=1)
    _finish(ax, unit)


def speeds(trace: RunTrace) -> dict[str, tuple[str, Points]]:
    """Lines of the rollouts' speed, and of what it would have been without drafts where that is known."""
    speed: Points = {n: metrics.get("tlt/rollout_tok_per_s") for n, metrics in trace.steps.items()}
    plain: dict[int, float | None] = dict.fromkeys(speed)
    for n, metrics in trace.steps.items():
        if (now := speed[n]) is not None and (saved_s := metrics.get("tlt/saved_s")) is not None:
            rollout_s = metrics.get("timing_s/gen", 0.0)
            plain[n] = now * rollout_s / max(rollout_s + saved_s, 1e-9)
    lines = {"this run": (BLUE, speed), "without drafts": (GREY, plain)}
    return {label: line for label, line in lines.items() if any(line[1].values())}


def accept_lengths(trace: RunTrace) -> dict[str, tuple[str, Points]]:
    """Lines of the run's drafter and of the one it began with."""
    rows = run_steps.rows_of_trace(trace)
    lines: dict[str, tuple[str, Points]] = {"this run": (BLUE, {n: row["accept_length"] for n, row in rows.items()})}
    if first := run_steps.initial_lengths(trace):
        lines["the run's first drafter"] = (GREY, first)
    return lines


def draft_lengths(trace: RunTrace) -> dict[str, tuple[str, list[float]]]:
    names = {-1: "tlt/drafter_off_frac", **_draft_length_metrics(trace)}
    bars = {
        k_name(k): (k_color(k, max(1, *names)), [metrics.get(name, 0.0) for metrics in trace.steps.values()])
        for k, name in names.items()
    }
    return {label: bar for label, bar in bars.items() if any(bar[1])}


def k_name(k: int) -> str:
    return "OFF" if k < 0 else f"K={k}"


def k_color(k: int, kmax: int) -> str:
    """Greys for OFF and 0, then from light to dark; transparent where no engine step ran."""
    if k > 0:
        return to_hex(matplotlib.colormaps["RdPu"](0.25 + 0.75 * k / kmax))
    return {0: "#9A9A9A", run_steps.NO_STEP: "none"}.get(k, "#333333")


def _finish(ax: Axes, unit: str) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("RL step")
    ax.set_ylabel(unit)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def _draft_length_metrics(trace: RunTrace) -> dict[int, str]:
    """Metrics of the share of engine steps by draft length, ascending."""
    names = {name for metrics in trace.steps.values() for name in metrics}
    lengths = {name: name.removeprefix("tlt/draft_length_frac_") for name in names}
    return dict(sorted((int(k), name) for name, k in lengths.items() if k.isdecimal() and len(k) < 3))
