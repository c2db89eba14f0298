"""Draws the figures of the pages from benchmarks/results/rollout.json: `python docs/figures.py`.

The same file gives the same bytes.

Texts are paths and the ground is white, so that a figure looks alike on a bright and a dark page.

    python docs/figures.py --record bubble --trace TRACE_DIR --step 3 --command "how the run was started"

takes the numbers of `bubble` or `chosen-k`, one step of a real run, out of its trace first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from verl_tlt.commands.report.reader import RunTrace

DOCS = Path(__file__).parent
ROLLOUT = DOCS.parent / "benchmarks" / "results" / "rollout.json"
BLUE, ORANGE, GREEN, PURPLE, INK, YELLOW = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#222222", "#F0E442"
PHASES = {"old_log_prob": ("log-probs", PURPLE), "update_actor": ("update", GREEN), "update_weights": ("sync", YELLOW)}
STYLE = {
    "svg.hashsalt": "verl-tlt", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "text.color": INK,
}  # fmt: skip
LANE = 0.8
"""Height of a replica's lane, as a share of the distance between lanes."""


def draw_bubble(figure: Figure, step: Mapping[str, Any]) -> None:
    """Replicas as rows over one RL step: decoding, with the height of the batch, training, and the policy's phases."""
    ax = figure.add_subplot()
    most = max(batch for replica in step["replicas"] for _, batch, _ in replica["batch"])
    for y, replica in zip(range(len(step["replicas"]))[::-1], step["replicas"], strict=True):
        times, batches = [t for t, _, _ in replica["batch"]], [batch for _, batch, _ in replica["batch"]]
        done = times[max(i for i, batch in enumerate(batches) if batch) + 1]
        ax.broken_barh([(done, step["rollout_s"] - done)], (y, LANE), color="#DDDDDD", label="nothing to decode")
        heights = y + LANE * np.array(batches[:-1]) / most
        ax.stairs(heights, times, baseline=y, fill=True, color=BLUE, label="decodes (height: batch)")
        spans = [(start, end - start) for start, end in replica["sessions"]]
        ax.broken_barh(spans, (y, LANE), facecolor="#FBE3B0", edgecolor=ORANGE, hatch="///", label="trains the drafter")
        for name, (start, end) in step["phases"].items():
            label, color = PHASES[name]
            ax.broken_barh([(start, end - start)], (y, LANE), color=color, label=label)
    ax.axvline(step["rollout_s"], color=INK, linewidth=1, linestyle="--")
    ax.set_yticks([y + LANE / 2 for y in range(len(step["replicas"]))], ["replica B", "replica A"])
    ax.set_xlim(0, max(end for _, end in step["phases"].values()))
    ax.set_xlabel("seconds; dashed: the rollout ends")
    found = dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(found.values(), found.keys(), loc="outside upper left", ncols=2)


def draw_length(figure: Figure, step: Mapping[str, Any]) -> None:
    """Batch and chosen K of each replica over one rollout."""
    axes = figure.subplots(2, 1, sharex=True)
    for name, color, replica in zip("AB", (BLUE, ORANGE), step["replicas"], strict=True):
        times, batches, lengths = (list(column) for column in zip(*replica["batch"], strict=True))
        for ax, values in zip(axes, (batches, lengths), strict=True):
            ax.stairs(values[:-1], times, baseline=None, color=color, linewidth=1.4, label=f"replica {name}")
    axes[0].set_ylabel("running batch")
    axes[1].set_ylabel("draft length K")
    axes[1].set_xlabel("seconds")
    first = min(t for replica in step["replicas"] for t, batch, _ in replica["batch"] if batch)
    axes[0].set_xlim(left=first)
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(bottom=-0.2)
    axes[0].legend()


FIGURES: dict[str, tuple[float, Callable[[Figure, Mapping[str, Any]], None]]] = {
    "bubble": (2.8, draw_bubble),
    "chosen-k": (3.2, draw_length),
}
"""Name: the height in inches, and what draws it."""


def draw(name: str, folder: Path) -> Path:
    """Draw one figure as SVG into `folder`. 4.6 inches wide, so that texts can be read on a phone."""
    height, draw_it = FIGURES[name]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, height), layout="constrained")
        draw_it(figure, json.loads(ROLLOUT.read_text())[name])
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    return folder / f"{name}.svg"


def numbers_of(trace: RunTrace, number: int) -> dict[str, Any]:
    """What `bubble` and `chosen-k` show of one RL step, in seconds since the rollout began; OFF counts as K=0."""
    from verl_tlt.commands.report.timeline import rl_steps, sampled

    step = rl_steps(trace)[number]
    at = np.linspace(step.start, step.end, 240)

    def since(*times: float) -> list[float]:
        return [round(time - step.start, 2) for time in times]

    replicas = []
    for name in trace.replicas:
        rows: list[list[float]] = []
        for t, batch, k in zip(at.tolist(), *sampled(trace, step, name, at), strict=True):
            row = [*since(t), int(batch), max(0, int(k))]
            rows += [row] if not rows or row[1:] != rows[-1][1:] else []
        sessions = [since(s.start, s.end) for s in step.sessions if s.replica == name]
        replicas.append({"batch": [*rows, [*since(step.end), 0, 0]], "sessions": sessions})
    replicas.sort(key=lambda replica: len(replica["sessions"]))
    phases = {phase.name: since(phase.start, phase.end) for phase in step.after if phase.name in PHASES}
    return {"step": number, "rollout_s": since(step.end)[0], "replicas": replicas, "phases": phases}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", choices=FIGURES, help="take the numbers of this figure first")
    parser.add_argument("--trace", type=Path, help="of a run")
    parser.add_argument("--step", type=int)
    parser.add_argument("--command", help="how the run was started")
    options = parser.parse_args()
    if options.record:
        from benchmarks.stored import store
        from verl_tlt.commands.report.reader import read_trace

        known = json.loads(ROLLOUT.read_text())
        known.pop("machine", None)
        found = {"command": options.command, **numbers_of(read_trace(options.trace), options.step)}
        store(ROLLOUT, {**known, options.record: found})
    for name in FIGURES:
        print(draw(name, DOCS))


if __name__ == "__main__":
    main()
