"""Draws the charts of a page with matplotlib: lines and stacked bars over RL steps."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, SKY, ORANGE, GREEN, PURPLE, RED = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
YELLOW, PALE, LIGHT, GREY, INK = "#F0E442", "#EEEEEE", "#CCCCCC", "#888888", "#222222"
STYLE = {
    "text.usetex": False,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.0,
}
WIDTH = 5.0
"""Width of a chart in inches: its text is 11 pixels high on a screen of 390 pixels."""
MARGIN = 0.12
"""Inches around a chart: a browser without the font takes one that may be a little wider."""


@dataclass(frozen=True)
class Chart:
    """A chart of a page, with a note on how to read it."""

    title: str
    note: str
    draw: Callable[[Axes], None]
    height: float = 3.2
    """Inches."""

    def svg(self) -> str:
        """The chart as SVG, in base64."""
        with matplotlib.rc_context(STYLE), io.BytesIO() as file:
            layout = ConstrainedLayoutEngine(w_pad=MARGIN, h_pad=MARGIN)
            figure = Figure(figsize=(WIDTH, self.height), layout=layout)
            self.draw(figure.add_subplot())
            figure.savefig(file, format="svg")
            return base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True)
class Series:
    """Values by RL step; NaN leaves a gap."""

    label: str
    color: str
    values: pd.Series


def draw_lines(ax: Axes, unit: str, series: Sequence[Series], lowest: float | None = None) -> None:
    """Draw a line with a dot at every step for each series; `lowest` is where the axis begins."""
    for line in series:
        if line.values.count():
            ax.plot(line.values.index, line.values, ".-", color=line.color, label=line.label)
    if lowest is not None:
        ax.set_ylim(bottom=lowest, top=max(ax.get_ylim()[1], lowest + 0.1))
    finish(ax, unit)


def draw_bars(ax: Axes, unit: str, series: Sequence[Series]) -> None:
    """Stack a bar of each series, all of the same steps, on those before it; negative values go below the axis."""
    known = series[0].values.index
    steps = range(known[0], known[-1] + 1)
    edges = np.arange(known[0], known[-1] + 2) - 0.5
    up, down = np.zeros(len(steps)), np.zeros(len(steps))
    for bars in series:
        heights = bars.values.reindex(steps).fillna(0.0).to_numpy()
        if not heights.any():
            continue
        bottom = np.where(heights < 0, down, up)
        ax.stairs(bottom + heights, edges, baseline=bottom, fill=True, color=bars.color, label=bars.label)
        up += np.maximum(heights, 0.0)
        down += np.minimum(heights, 0.0)
    ax.set_xlim(edges[0], edges[-1])
    ax.axhline(0, color=GREY, linewidth=1)
    finish(ax, unit)


def finish(ax: Axes, unit: str) -> None:
    """Label the axes, and add a legend if there is more than one series."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("RL step")
    ax.set_ylabel(unit)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
