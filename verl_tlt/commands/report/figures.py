"""The charts of a run's page: values over RL steps, and what every replica did during one step."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import Patch

from verl_tlt.commands.charts import (
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
from verl_tlt.commands.report.steps import initial_lengths, new_drafters, own_work_s, rows_of_trace
from verl_tlt.commands.report.timeline import NO_STEP, RLStep, sampled

TRAINING: dict[str, Any] = {"facecolor": "#FBE3B0", "edgecolor": ORANGE, "hatch": "///"}
PHASES = {
    "reward": ("reward model", SKY),
    "old_log_prob": ("log-probs", PURPLE),
    "update_actor": ("policy update", GREEN),
    "update_weights": ("weight sync", YELLOW),
}
"""Phases on the policy's devices after the rollout: name in the chart, colour."""
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
    saved = {n: row["saved_s"] or 0.0 for n, row in rows.items()}
    accounts = [
        Series("saved", GREEN, {n: max(0.0, seconds) for n, seconds in saved.items()}),
        Series("lost", RED, {n: min(0.0, seconds) for n, seconds in saved.items()}),
        Series("TLT's own work", ORANGE, {n: -own_work_s(row) for n, row in rows.items()}),
    ]
    if any(one.has_area for one in accounts):
        note = "Seconds that drafts saved or lost in each rollout (an estimate), and TLT's own work."
        yield Chart("What it saved", note, partial(draw_bars, unit="seconds", series=accounts))
    lengths = [
        Series("this run", BLUE, {n: row["accept_length"] for n, row in rows.items()}),
        Series("first drafter", GREY, dict(initial_lengths(trace))),
    ]
    if lengths[0].visible:
        note = "Tokens per verified draft; 1 where nothing was drafted."
        note += " The first drafter is scored on held-out text." if lengths[1].visible else ""
        yield Chart("Accept length", note, partial(draw_accept_length, series=lengths, new=new_drafters(rows)))
    if shares := draft_lengths(trace):
        note = "Share of engine steps by draft length. OFF: the drafter did not run."
        yield Chart("Draft length K", note, partial(draw_bars, unit="share of engine steps", series=shares))
    trained = {n: row["idle_trained_s"] or 0.0 for n, row in rows.items()}
    idle = [
        Series("training the drafter", ORANGE, trained),
        Series("unused", LIGHT, {n: max(0.0, (row["idle_s"] or 0.0) - trained[n]) for n, row in rows.items()}),
    ]
    if any(one.has_area for one in idle):
        note = "Seconds in which replicas had nothing to decode while another one did, summed over replicas."
        yield Chart("Idle time", note, partial(draw_bars, unit="seconds", series=idle))
    reward = [Series("reward", BLUE, {n: row["reward"] for n, row in rows.items()})]
    if reward[0].visible:
        yield Chart("Reward", "Mean over the responses of a step.", partial(draw_lines, unit="reward", series=reward))


def draw_accept_length(ax: Axes, series: Sequence[Series], new: Sequence[int]) -> None:
    """Draw the accept length of the run, the first of the `series`, marked where a `new` drafter begins."""
    lengths = {step: length for step in new if (length := series[0].values[step]) is not None}
    if lengths:
        ax.plot(list(lengths), list(lengths.values()), "o", color=ORANGE, zorder=3, label="new drafter")
    draw_lines(ax, "tokens per draft", series, lowest=1.0)


def draft_lengths(trace: RunTrace) -> list[Series]:
    """The share of engine steps by draft length: OFF first, then K ascending."""
    lengths = _draft_lengths_logged(trace)
    names = {-1: SHARE_OF_OFF, **{k: f"{SHARE_OF_K}{k}" for k in lengths}}
    longest = max(1, *lengths, 1)
    series = [
        Series(k_name(k), k_color(k, longest), {n: metrics.get(name, 0.0) for n, metrics in trace.steps.items()})
        for k, name in names.items()
    ]
    return [one for one in series if one.has_area]


def step_chart(trace: RunTrace, step: RLStep) -> Chart:
    """A lane for each replica over one RL step."""
    count = max(1, min(MOST_LANES, len(trace.replicas)))
    note = "Upper part of a lane: requests in the batch."
    note += " Lower part: draft length K." if trace.engines else ""
    if len(trace.replicas) > MOST_LANES:
        note += f" The first {MOST_LANES} of {len(trace.replicas)} replicas."
    height = 2.2 + count * min(1.0, max(0.3, 5 / count))
    draw = partial(draw_replicas, trace=trace, step=step)
    return Chart(f"RL step {step.step}: what every replica did", note, draw, height)


def draw_replicas(ax: Axes, trace: RunTrace, step: RLStep) -> None:
    """Draw each replica's batch and K, the training on it, and the policy's phases after the rollout."""
    names = trace.replicas[:MOST_LANES]
    edges = np.linspace(step.start, step.finish, COLUMNS + 1)
    lanes = [sampled(trace, step, name, (edges[:-1] + edges[1:]) / 2) for name in names]
    most = max([1, *(int(batch.max()) for batch, _ in lanes)])
    ks = sorted({value for _, k in lanes for value in k.tolist()})
    longest = max([1, *ks, *_draft_lengths_logged(trace)])  # of the run: a K has one colour in all charts
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
    ax.axvline(step.end - step.start, color=INK, linewidth=1, linestyle="--", label="end of the rollout")
    ax.set_yticks([y + LANE / 2 for y in range(len(names))], [trace.label(n) for n in reversed(names)])
    ax.set_xlim(0, seconds[-1])
    ax.set_ylim(-0.1, len(names))
    ax.set_xlabel(f"seconds (rollout: {step.end - step.start:.1f} s)")
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
    for phase in (p for p in step.after if p.name in PHASES):
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
