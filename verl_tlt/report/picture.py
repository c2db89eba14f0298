"""The static picture of a run, drawn from its trace with matplotlib (no display needed).

Colours are Okabe and Ito's, which stay apart for colour-blind readers; what matters is labelled where it is drawn, and
training in the bubble is hatched as well, so nothing hangs on colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from verl_tlt.report.lanes import BLUE, ORANGE, PALE, PHASES
from verl_tlt.report.reader import RunTrace, TraceError
from verl_tlt.report.steps import most_trained, rl_steps
from verl_tlt.report.summary import StepRow, initial_lengths
from verl_tlt.report.svg import INK, MUTED
from verl_tlt.trace.events import Phase, Session

LIGHT_BLUE = "#CFE3F0"

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "hatch.linewidth": 1.2,
}

LANE = 0.78
"""Height of a replica's lane, of 1."""


def draw_replicas(ax: Axes, trace: RunTrace, step: int) -> None:
    """One lane per replica over one RL step: decoding by requests in flight, the bubble, the training in it, the rest.

    The policy's own phases are drawn where it is trained: not on standalone replicas.

    Raises:
        TraceError: the step has no finished rollout.
    """
    rollout = trace.phase(step, "rollout")
    if rollout is None:
        raise TraceError(f"{trace.directory} holds no finished rollout of step {step}.")
    zero, names = rollout.start, trace.replicas
    samples = [load for load in trace.loads if load.step == step]
    most = max((n for load in samples for n in load.inflight.values()), default=1) or 1
    after = [p for p in trace.phases if p.step == step and p.name in PHASES and p.end > rollout.end]
    total = max([rollout.end, *(p.end for p in after)]) - zero
    trained, top = [], len(names) - 1
    apart = set(trace.run.standalone if trace.run else ())
    for lane, name in enumerate(reversed(names)):
        _box(ax, 0.0, rollout.end - zero, lane, PALE, "waiting")
        times = np.clip([load.t - zero for load in samples] + [rollout.end - zero], 0.0, rollout.end - zero)
        counts = np.array([load.inflight.get(name, 0) for load in samples] + [0])
        _draw_decoding(ax, times, counts, lane, most)
        idle = next((i.start for i in trace.idles if i.step == step and i.replica == name), None)
        sessions = [s for s in trace.sessions if s.step == step and s.replica == name and s.steps]
        bubble = "" if idle is None else f" of a {rollout.end - idle:.1f} s bubble"
        for s in sessions:
            trained.append(trace.label(name))
            _draw_training(ax, s, zero, lane, bubble, rollout.end, total)
        if idle is not None and not sessions and rollout.end - idle > 0.1 * total:
            middle = (idle + rollout.end) / 2 - zero
            _label(ax, middle, lane + LANE / 2, f"idle: a bubble of {rollout.end - idle:.1f} s", MUTED)
        for p in after if name not in apart else ():
            top = lane
            _box(ax, p.start - zero, p.end - zero, lane, PHASES[p.name][1], p.name)
    for p in after:
        _label_phase(ax, p, zero, top, total)
    end = rollout.end - zero
    ax.axvline(end, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.annotate(
        f"rollout ends: {end:.1f} s", (end, len(names) - 1 + LANE), (-5, 4), textcoords="offset points",
        ha="right", va="bottom", fontsize=9, color=INK,
    )  # fmt: skip
    ax.set_yticks([lane + LANE / 2 for lane in range(len(names))], [trace.label(name) for name in reversed(names)])
    ax.set_xlim(0, total * 1.005)
    ax.set_ylim(-0.05, len(names) + 0.1)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("time since the step began (s)")
    ax.set_title(f"RL step {step}: {_who_trained(sorted(set(trained)))}")


def _who_trained(labels: Sequence[str]) -> str:
    if not labels:
        return "the replicas over time"
    if len(labels) == 1:
        return f"{labels[0]} trained the drafter in its bubble"
    return f"{len(labels)} replicas trained the drafter in their bubbles"


def _draw_decoding(ax: Axes, times: Floats, counts: Ints, lane: int, most: int) -> None:
    """Requests in flight, as the height of a filled step line in the lane."""
    busy = np.flatnonzero(counts > 0)
    if not busy.size:
        return
    last = times[min(busy[-1] + 1, len(times) - 1)]
    ax.add_patch(Rectangle((0.0, lane), last, LANE, facecolor=LIGHT_BLUE, linewidth=0, gid="decoding"))
    ax.fill_between(times, lane, lane + LANE * counts / most, step="post", color=BLUE, linewidth=0, gid="inflight")
    peak = int(np.argmax(counts))
    falls = peak + int(np.argmax(counts[peak:] < 0.75 * most))
    ax.annotate(
        f"peak: {counts[peak]} in flight", (times[falls], lane + LANE), (5, -4),
        textcoords="offset points", ha="left", va="top", fontsize=9, color=BLUE,
    )  # fmt: skip
    tail = busy[(counts[busy] <= max(2, most // 10)) & (busy > peak)]
    if tail.size and last - times[tail[0]] > 0.2 * times[-1]:
        text = f"decodes the tail: {counts[tail[0]]} or fewer"
        _label(ax, (times[tail[0]] + last) / 2, lane + LANE / 2, text, BLUE)


def _draw_training(
    ax: Axes, session: Session, zero: float, lane: int, bubble: str, rollout_end: float, total: float
) -> None:
    start, seconds = session.start - zero, session.end - session.start
    inside = min(session.end, rollout_end) - session.start
    ax.add_patch(
        Rectangle((start, lane), seconds, LANE, facecolor="#FBE3B0", edgecolor=ORANGE, hatch="///", linewidth=1.2,
                  gid="training")
    )  # fmt: skip
    if seconds > 0.2 * total:
        text = f"trains the drafter\n{inside:.1f} s{bubble}, {session.steps} steps"
    elif seconds > 0.08 * total:
        text = f"trains\n{inside:.1f} s"
    else:
        return
    _label(ax, start + seconds / 2, lane + LANE / 2, text, INK, background="white")


def _label_phase(ax: Axes, phase: Phase, zero: float, lane: int, total: float) -> None:
    """Inside the top lane's box where it fits, upright where it is narrow, above where it is a sliver."""
    name, seconds = PHASES[phase.name][0], phase.end - phase.start
    middle = (phase.start + phase.end) / 2 - zero
    if seconds > 0.1 * total:
        _label(ax, middle, lane + LANE / 2, f"{name}\n{seconds:.1f} s", "white")
    elif seconds > 0.025 * total:
        text = f"{name}\n{seconds:.1f} s" if seconds > 0.04 * total else name
        _label(ax, middle, lane + LANE / 2, text, "white", rotation=90)
    else:
        ax.annotate(
            f"{name} {seconds:.1f} s", (phase.end - zero, lane + LANE), (2, 4), textcoords="offset points",
            ha="right", va="bottom", fontsize=9, color=MUTED,
        )  # fmt: skip


def _label(
    ax: Axes, x: float, y: float, text: str, color: str, rotation: float = 0.0, background: str | None = None
) -> None:
    box = {"facecolor": background, "edgecolor": "none", "pad": 2.5, "alpha": 0.9} if background else None
    ax.text(x, y, text, ha="center", va="center", fontsize=9, color=color, rotation=rotation, bbox=box)


def _box(ax: Axes, start: float, end: float, lane: int, color: str, gid: str) -> None:
    ax.add_patch(Rectangle((start, lane), end - start, LANE, facecolor=color, linewidth=0, gid=gid))


def draw_accept_length(
    ax: Axes, rows: Sequence[StepRow], initial: Mapping[int, float], warm: Sequence[StepRow] | None = None
) -> None:
    """Accept length by RL step, beside what the first drafter would have been accepted at had nobody trained it."""
    known = [(r.step, r.accept_length) for r in rows if r.accept_length is not None]
    top = 2.0
    if initial:
        steps, values = zip(*sorted(initial.items()), strict=True)
        ax.plot(steps, values, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), gid="initial")
        ax.annotate(f"first drafter, never trained: {values[-1]:.2f}", (steps[-1], values[-1]), (0, -4),
                    textcoords="offset points", ha="right", va="top", fontsize=9, color=MUTED)  # fmt: skip
        top = max(top, *values)
    if known:
        steps, values = zip(*known, strict=True)
        ax.plot(steps, values, color=BLUE, marker="o", linewidth=2, gid="accept_length")
        for i in sorted({0, len(steps) - 1}):
            ax.annotate(f"{values[i]:.2f}", (steps[i], values[i]), (0, 7), textcoords="offset points", ha="center",
                        color=BLUE, fontweight="bold")  # fmt: skip
        top = max(top, *values)
    if warm and (warmed := [(r.step, r.accept_length) for r in warm if r.accept_length is not None]):
        steps, values = zip(*warmed, strict=True)
        ax.plot(steps, values, color=ORANGE, marker="s", markersize=4, linewidth=1.5, gid="warm")
        ax.annotate("started with the trained drafter", (steps[0], values[0]), (0, 8), textcoords="offset points",
                    ha="left", color="#8A5A00", fontsize=9)  # fmt: skip
        top = max(top, *values)
    ax.set_ylim(0.8, top + 0.35)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("RL step")
    ax.set_ylabel("accept length\n(tokens per verified draft)")
    ax.set_title("Accept length by RL step")


def main_figure(trace: RunTrace, rows: Sequence[StepRow], warm: Sequence[StepRow] | None = None) -> Figure:
    """The demo's picture: the replicas in one rollout above, the accept length by step below."""
    with matplotlib.rc_context(STYLE):
        count = max(2, len(trace.replicas))
        lanes = count * min(1.15, max(0.55, 4.6 / count))  # inches; many replicas get narrower lanes
        figure = Figure(figsize=(11, 3.6 + lanes), layout="constrained")
        upper, lower = figure.subplots(2, 1, height_ratios=[lanes, 2.4])
        draw_replicas(upper, trace, most_trained(rl_steps(trace)))
        draw_accept_length(lower, rows, initial_lengths(trace), warm)
    return figure


def save_png(figure: Figure, path: str | Path) -> Path:
    """Write the figure at a resolution fit for slides; returns the path."""
    with matplotlib.rc_context(STYLE):
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=160, facecolor="white")
    return Path(path)
