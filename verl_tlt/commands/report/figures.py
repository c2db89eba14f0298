"""Draws a traced run with matplotlib: the charts of the page, and `picture.png`.

Colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

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
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from verl_tlt.commands.report import steps as run_steps
from verl_tlt.commands.report.reader import RunTrace
from verl_tlt.files.ownership import replacing

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
PANEL = 2.9
"""Inches of height of a panel of the picture."""
MARGIN = 0.12
"""Inches around a chart: a browser without the font takes one that may be a little wider."""
DRAFT_LENGTH = "tlt/draft_length_frac_"
"""Metrics of the share of engine steps by draft length."""
COLUMNS = 600
"""Times at which a replica's lane is sampled."""
MOST_LANES = 64
"""Replicas in a chart; of more the first."""
LANE, STRIP = 0.84, 0.26
"""Height of a lane and of the draft lengths at its bottom, as a share of the distance between lanes."""

UNDRAFTED = "Dashed: what the same rollouts reach without drafts, by TLT's own account."

Points = Mapping[int, float | None]
"""Values by RL step; None leaves a gap."""


@dataclass(frozen=True)
class Chart:
    """A chart of the page, with a note on how to read it; its SVG is in base64."""

    title: str
    note: str
    svg: str


def run_charts(trace: RunTrace) -> Iterator[Chart]:
    """The charts over RL steps; one without a value is left out."""
    steps, rows = list(trace.steps), list(run_steps.rows_of_trace(trace).values())
    saved = [row["saved_s"] or 0.0 for row in rows]
    if any(row["saved_s"] is not None for row in rows):
        bars = {
            "saved": (GREEN, [max(0.0, s) for s in saved]),
            "lost": (RED, [min(0.0, s) for s in saved]),
            "TLT's own work": (ORANGE, [-run_steps.own_work_s(row) for row in rows]),
        }
        note = "Seconds by which rollouts with drafts ended earlier than without drafts, estimated from measured costs."
        yield make_chart("Savings", note, partial(draw_bars, unit="seconds", steps=steps, bars=bars))
    for title, unit, note, lines, lowest in (
        ("Accept length", "tokens", "Tokens per verified draft.", accept_lengths(trace), 1.0),
        ("Speed of the rollout", "tokens per second", UNDRAFTED, speeds(trace), 0.0),
        ("Reward", "reward", "Mean reward.", {"": (BLUE, by_step(trace, "reward"))}, None),
    ):
        if any(value is not None for _, points in lines.values() for value in points.values()):
            yield make_chart(title, note, partial(draw_lines, unit=unit, lines=lines, lowest=lowest))
    if lengths := draft_lengths(trace):
        note = "Share of engine steps. OFF: the drafter's pass was skipped; K=0: nothing was drafted in the step."
        yield make_chart("Draft length K", note, partial(draw_bars, unit="share", steps=steps, bars=lengths))
    if any(row["bubble_s"] for row in rows):
        trained = [row["bubble_trained_s"] or 0.0 for row in rows]
        idle = [(row["bubble_s"] or 0.0) - used for row, used in zip(rows, trained, strict=True)]
        bars = {"training the drafter": (ORANGE, trained), "idle": ("#CCCCCC", idle)}
        note = "Seconds in which replicas had nothing to decode, summed over replicas."
        yield make_chart("Bubbles", note, partial(draw_bars, unit="seconds", steps=steps, bars=bars))


def step_charts(trace: RunTrace, steps: Mapping[int, run_steps.RLStep]) -> Iterator[Chart]:
    """The replicas over time in the first and the last step and the one with the most training."""
    note = "Upper part of a lane: batch, or requests in flight where engine steps were not traced; lower part: K."
    if len(trace.replicas) > MOST_LANES:
        note += f" The first {MOST_LANES} of {len(trace.replicas)} replicas."
    for number in sorted({min(steps), run_steps.most_trained(steps), max(steps)}):
        draw = partial(draw_replicas, trace=trace, step=steps[number])
        yield make_chart(f"RL step {number}: the replicas over time", note, draw, 2.2 + _lanes_height(trace))


def save_picture(path: Path, trace: RunTrace) -> Path:
    """Write a PNG of one column: speed, accept length, draft lengths, and the replicas in the most trained step."""
    steps = run_steps.rl_steps(trace)
    number = run_steps.most_trained(steps)
    draws: dict[str, Callable[[Axes], None]] = {
        "Speed of the rollout": partial(draw_lines, unit="tokens per second", lines=speeds(trace), lowest=0.0),
        "Accept length": partial(draw_lines, unit="tokens per draft", lines=accept_lengths(trace), lowest=1.0),
        "Draft length K": partial(
            draw_bars, unit="share of engine steps", steps=list(trace.steps), bars=draft_lengths(trace)
        ),
        f"RL step {number}: the replicas over time": partial(draw_replicas, trace=trace, step=steps[number]),
    }  # fmt: skip
    heights = [PANEL] * 3 + [2.2 + _lanes_height(trace)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        parts = figure.subfigures(len(draws), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part, (title, draw) in zip(parts, draws.items(), strict=True):
            part.suptitle(title, fontweight="bold", x=0.02, ha="left")
            draw(part.add_subplot())
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
    longest = max([1, *ks, *_numbered(trace, DRAFT_LENGTH)])  # of the run: a K has one colour in all charts
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
    for label, (color, values) in bars.items():
        heights = np.array(values)
        bottom = np.where(heights < 0, down, up)
        ax.bar(steps, heights, 0.85 if len(steps) < 60 else 1.0, bottom, color=color, label=label)
        up, down = up + np.maximum(heights, 0.0), down + np.minimum(heights, 0.0)
    ax.axhline(0, color=GREY, linewidth=1)
    _finish(ax, unit)


def by_step(trace: RunTrace, column: str) -> Points:
    return {step: row[column] for step, row in run_steps.rows_of_trace(trace).items()}


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
    lines: dict[str, tuple[str, Points]] = {"this run": (BLUE, by_step(trace, "accept_length"))}
    first = run_steps.initial_lengths(trace)
    return {**lines, "the run's first drafter": (GREY, first)} if first else lines


def draft_lengths(trace: RunTrace) -> dict[str, tuple[str, list[float]]]:
    """Bars of the share of engine steps by draft length."""
    lengths = _numbered(trace, DRAFT_LENGTH)
    names = {-1: "tlt/drafter_off_frac", **lengths}
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


def make_chart(title: str, note: str, draw: Callable[[Axes], None], height: float = 3.2) -> Chart:
    """A chart of what `draw` draws, so many inches high."""
    with matplotlib.rc_context(STYLE), io.BytesIO() as file:
        layout = ConstrainedLayoutEngine(w_pad=MARGIN, h_pad=MARGIN)
        figure = Figure(figsize=(WIDTH, height), layout=layout)
        draw(figure.add_subplot())
        figure.savefig(file, format="svg")
        return Chart(title, note, base64.b64encode(file.getvalue()).decode())


def _finish(ax: Axes, unit: str) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("RL step")
    ax.set_ylabel(unit)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def _numbered(trace: RunTrace, prefix: str) -> dict[int, str]:
    """Metrics with this prefix by the number at their end, ascending."""
    names = {name for metrics in trace.steps.values() for name in metrics if name.startswith(prefix)}
    found = {int(end): name for name in names if (end := name.removeprefix(prefix)).isdecimal() and len(end) < 3}
    return dict(sorted(found.items()))


def _lanes_height(trace: RunTrace) -> float:
    count = max(1, min(MOST_LANES, len(trace.replicas)))
    return count * min(1.0, max(0.3, 5 / count))
