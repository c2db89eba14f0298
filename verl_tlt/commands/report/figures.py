"""The charts of a run's page: values over RL steps, and what every replica did during one step."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import Patch

from verl_tlt.commands.report.charts import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LIGHT,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    Chart,
    Series,
    draw_bars,
    draw_lines,
)
from verl_tlt.commands.report.reader import RunTrace
from verl_tlt.commands.report.steps import new_drafters, own_work_s, rows_of_trace
from verl_tlt.commands.report.timeline import NO_STEP, RLStep, decodes_until, sampled

TRAINING: dict[str, Any] = {"facecolor": "#FBE3B0", "edgecolor": ORANGE, "hatch": "///"}
PHASES = {
    "reward": ("reward model", SKY),
    "old_log_prob": ("log-probs", PURPLE),
    "update_actor": ("policy update", GREEN),
    "update_weights": ("weight sync", YELLOW),
}
"""Phases on the policy's devices beside the rollout: name in the chart, colour."""
COLUMNS = 600
"""Number of times at which a replica's lane is sampled."""
MOST_LANES = 64
"""Most replicas in a chart; of more, the first are drawn."""
LANE, STRIP = 0.84, 0.26
"""Height of a lane and of the draft lengths at its bottom, as a share of the distance between lanes."""
SHARE_OF_K = "tlt/draft_length_frac_"
SHARE_OF_OFF = "tlt/drafter_off_frac"


def run_charts(trace: RunTrace) -> Iterator[Chart]:
    """The charts over RL steps; one without a value is left out."""
    rows = rows_of_trace(trace)
    note = "Seconds that drafts saved or lost in each rollout (an estimate), and TLT's own work."
    saved = Series("saved", GREEN, rows.saved_s.clip(lower=0.0))
    lost = Series("lost", RED, rows.saved_s.clip(upper=0.0))
    yield from bar_chart(
        "What it saved", note, "seconds", [saved, lost, Series("TLT's own work", ORANGE, -own_work_s(rows))]
    )
    if rows.accept_length.count():
        first = pd.Series({p.step: p.tau.get("initial") for p in trace.publishes}, dtype=float).dropna()
        note = "Tokens per verified draft; none where nothing was drafted."
        note += "" if first.empty else " The first drafter is scored on held-out text."
        lengths = [Series("this run", BLUE, rows.accept_length), Series("first drafter", GREY, first)]
        yield Chart("Accept length", note, partial(draw_accept_length, series=lengths, new=new_drafters(rows)))
    note = "Share of engine steps by draft length. OFF: the drafter did not run."
    yield from bar_chart("Draft length K", note, "share of engine steps", draft_lengths(trace))
    note = "Seconds in which replicas had nothing to decode while another one did, summed over replicas."
    if trace.standalone:
        note = "Seconds in which the trainer's devices waited for samples."
    trained = rows.idle_trained_s.fillna(0.0)
    unused = Series("unused", LIGHT, (rows.idle_s - trained).clip(lower=0.0))
    yield from bar_chart("Idle time", note, "seconds", [Series("training the drafter", ORANGE, trained), unused])
    if rows.reward.count():
        reward = [Series("reward", BLUE, rows.reward)]
        yield Chart("Reward", "Mean over the responses of a step.", partial(draw_lines, unit="reward", series=reward))


def bar_chart(title: str, note: str, unit: str, series: Sequence[Series]) -> Iterator[Chart]:
    """The chart of these bars, if there is one that can be seen."""
    if any(bars.values.any() for bars in series):
        yield Chart(title, note, partial(draw_bars, unit=unit, series=series))


def draw_accept_length(ax: Axes, series: Sequence[Series], new: Sequence[int]) -> None:
    """Draw the accept length of the run, the first of the `series`, marked where a `new` drafter begins."""
    begun = series[0].values[new].dropna()
    if not begun.empty:
        ax.plot(begun.index, begun, "o", color=ORANGE, zorder=3, label="new drafter")
    draw_lines(ax, "tokens per draft", series, lowest=1.0)


def draft_lengths(trace: RunTrace) -> list[Series]:
    """The share of engine steps by draft length: OFF first, then K ascending."""
    lengths = _draft_lengths_logged(trace)
    names = {-1: SHARE_OF_OFF, **{k: f"{SHARE_OF_K}{k}" for k in lengths}}
    longest = max([1, *lengths])
    steps = pd.DataFrame.from_dict(trace.steps, orient="index")
    shares = steps.reindex(index=sorted(trace.steps), columns=list(names.values()))
    return [Series(k_name(k), k_color(k, longest), shares[name]) for k, name in names.items()]


def step_chart(trace: RunTrace, step: RLStep) -> Chart:
    """A lane for each replica over one RL step."""
    count = max(1, min(MOST_LANES, len(trace.replicas)))
    note = "Upper part of a lane: requests in the batch."
    note += " Lower part: draft length K." if trace.engine_files else ""
    if len(trace.replicas) > MOST_LANES:
        note += f" The first {MOST_LANES} of {len(trace.replicas)} replicas."
    height = 2.2 + count * min(1.0, max(0.3, 5 / count))
    draw = partial(draw_replicas, trace=trace, step=step)
    return Chart(f"RL step {step.step}: what every replica did", note, draw, height)


def draw_replicas(ax: Axes, trace: RunTrace, step: RLStep) -> None:
    """Draw each replica's batch and K, the training on it, and the policy's other phases."""
    names = trace.replicas[:MOST_LANES]
    edges = np.linspace(step.start, step.finish, COLUMNS + 1)
    lanes = [sampled(trace, step, name, (edges[:-1] + edges[1:]) / 2) for name in names]
    most = max([1, *(int(batch.max()) for batch, _ in lanes)])
    ks = sorted({value for _, k in lanes for value in k.tolist()})
    longest = max([1, *ks, *_draft_lengths_logged(trace)])  # of the run: a K has one colour in all charts
    colors = {k: k_color(k, longest) for k in ks}
    seconds = edges - step.start
    for y, name, (batch, k) in zip(range(len(names))[::-1], names, lanes, strict=True):
        decoding = (0.0, decodes_until(trace, step, name) - step.start)
        ax.broken_barh([decoding], (y, LANE), color=PALE, linewidth=0, label="nothing to decode")
        change = np.flatnonzero(np.diff(batch, prepend=-1))
        height = y + STRIP + (LANE - STRIP) * batch[change] / most
        ax.stairs(height, [*seconds[change], seconds[-1]], baseline=y + STRIP, fill=True, color=BLUE)
        strip = np.array([[to_rgba(colors[value]) for value in k.tolist()]])  # [1, columns, RGBA]
        ax.imshow(strip, extent=(0.0, seconds[-1], y, y + STRIP), aspect="auto", interpolation="nearest", zorder=2)
        _draw_work(ax, trace, step, name, y)
    ax.axvline(step.end - step.start, color=INK, linewidth=1, linestyle="--", label="end of the rollout")
    ax.set_yticks([y + LANE / 2 for y in range(len(names))], [trace.label(n) for n in reversed(names)])
    ax.set_xlim(0, seconds[-1])
    ax.set_ylim(-0.1, len(names))
    ax.set_xlabel(f"seconds (rollout: {step.rollout_s:.1f} s)")
    legend: dict[str, Any] = {f"batch, up to {most} requests": Patch(color=BLUE)}
    legend |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    legend |= {k_name(k): Patch(color=color) for k, color in colors.items() if k != NO_STEP}
    ax.legend(legend.values(), legend.keys(), loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _draw_work(ax: Axes, trace: RunTrace, step: RLStep, replica: str, y: int) -> None:
    """Draw training on the replica, and the policy's phases unless the replica is standalone."""
    sessions = [(s.start - step.start, s.end - s.start) for s in step.sessions if s.replica == replica]
    if sessions:
        ax.broken_barh(sessions, (y, LANE), linewidth=1, label="training the drafter", **TRAINING)
    if trace.run and replica in trace.run.standalone:
        return
    for phase in (p for p in step.others if p.name in PHASES):
        label, color = PHASES[phase.name]
        span = (phase.start - step.start, phase.end - phase.start)
        ax.broken_barh([span], (y, LANE), color=color, linewidth=0, label=label)


def k_name(k: int) -> str:
    return "OFF" if k < 0 else f"K={k}"


def k_color(k: int, longest: int) -> str:
    """Greys for OFF and 0, then from light to dark; transparent where no engine step ran."""
    if k > 0:
        return to_hex(matplotlib.colormaps["RdPu"](0.25 + 0.75 * k / longest))
    return {0: "#9A9A9A", NO_STEP: "none"}.get(k, "#333333")


def _draft_lengths_logged(trace: RunTrace) -> list[int]:
    """Draft lengths of which the share is logged, ascending."""
    ends = {name.removeprefix(SHARE_OF_K) for metrics in trace.steps.values() for name in metrics}
    return sorted(int(end) for end in ends if end.isdecimal())
