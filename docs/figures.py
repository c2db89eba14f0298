"""Draws the figures of the pages from files of results, the same bytes from the same file: `python docs/figures.py`.

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
RESULTS = DOCS.parent / "benchmarks" / "results"
BLUE, ORANGE, GREEN, PURPLE, INK, YELLOW = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#222222", "#F0E442"
PHASES = {"old_log_prob": ("log-probs", PURPLE), "update_actor": ("update", GREEN), "update_weights": ("sync", YELLOW)}
ARMS = {
    "online": (BLUE, "online: trained along"),
    "extra": (GREEN, "extra: trained before"),
    "frozen": (ORANGE, "frozen"),
}
"""Of the study: colour, and name in the figure."""
STARTS = {"random": "random", "generic": "trained on other text", "in_domain": "trained on the task's text"}
T_95 = 2.776
"""Student's t, two-sided 95 %, for the five runs of the study."""
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


def draw_accept_length(figure: Figure, study: Mapping[str, Any]) -> None:
    """Accept length over RL steps: mean of the study's runs and a 95 % band over them, a panel for each start."""
    axes = figure.subplots(3, 1, sharex=True, sharey=True)
    for ax, (start, title) in zip(axes, STARTS.items(), strict=True):
        for arm, (color, label) in ARMS.items():
            rows = [row for row in study["served"] if (row["start"], row["arm"]) == (start, arm)]
            steps = sorted({row["step"] for row in rows})
            values = np.array([[row["accept_length"] for row in rows if row["step"] == step] for step in steps])
            mean, half = values.mean(1), T_95 * values.std(1, ddof=1) / np.sqrt(values.shape[1])
            ax.plot(steps, mean, ".-", color=color, label=label)
            ax.fill_between(steps, np.maximum(mean - half, 1.0), mean + half, color=color, alpha=0.15, linewidth=0)
        ax.set_title(f"drafter at the start: {title}", fontsize=10, loc="left")
        ax.set_ylabel("accept length")
        ax.grid(alpha=0.3)
    axes[-1].set_xlabel("RL step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)


FIGURES: dict[str, tuple[str, float, Callable[[Figure, Mapping[str, Any]], None]]] = {
    "bubble": ("rollout", 2.8, draw_bubble),
    "chosen-k": ("rollout", 3.2, draw_length),
    "accept-length": ("drafter_study", 6.0, draw_accept_length),
}
"""Name: the file of results, the height in inches, and what draws it."""


def numbers(name: str) -> Mapping[str, Any]:
    """What a figure is drawn from."""
    found = json.loads((RESULTS / f"{FIGURES[name][0]}.json").read_text())
    return found.get(name, found)


def draw(name: str, folder: Path) -> Path:
    """Draw one figure as SVG into `folder`. 4.6 inches wide, so that texts can be read on a phone."""
    _, height, draw_it = FIGURES[name]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, height), layout="constrained")
        draw_it(figure, numbers(name))
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
    parser.add_argument("--record", choices=("bubble", "chosen-k"), help="take the numbers of this figure first")
    parser.add_argument("--trace", type=Path, help="of a run")
    parser.add_argument("--step", type=int)
    parser.add_argument("--command", help="how the run was started")
    options = parser.parse_args()
    if options.record:
        from benchmarks.stored import store
        from verl_tlt.commands.report.reader import read_trace

        file = RESULTS / "rollout.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        known.pop("machine", None)
        found = {"command": options.command, **numbers_of(read_trace(options.trace), options.step)}
        store(file, {**known, options.record: found})
    for name in FIGURES:
        print(draw(name, DOCS))


if __name__ == "__main__":
    main()
