"""One RL step as a picture: a lane per replica over time, with its load, the draft lengths chosen, bubble and training.

A lane is two strips. The upper is as high as the batch; the lower shows the draft length K, by height and by colour.
Colours stay apart for colour-blind readers, and training is hatched as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

import numpy as np
import numpy.typing as npt

from verl_tlt.report.reader import RunTrace
from verl_tlt.report.steps import IDLE_ENGINE, Ints, RLStep, sampled_engine, sampled_load
from verl_tlt.report.svg import GLYPH, GRID, MUTED, WIDTH, Chart, element, figure, text, ticks

BLUE, SKY, ORANGE, GREEN, PURPLE, RED = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
PALE, OFF_COLOR, ZERO_COLOR = "#EEEEEE", "#333333", "#9A9A9A"
PHASES = {
    "reward": ("reward model", SKY),
    "old_log_prob": ("log-probs", PURPLE),
    "update_actor": ("policy update", GREEN),
    "update_weights": ("weight sync", "#999999"),
}
"""Phases on the GPU workers after the rollout: what they are called in pictures, and their colour."""
LEFT, NOTES, TOP, BOTTOM = 110, 190, 26, 40
PLOT = WIDTH - LEFT - NOTES
"""Pixels between the lanes' labels and the notes on their right."""
ALL_COLUMNS = 4_000_000
"""Columns of all lanes of a page together; a long run of many replicas gets coarser ones."""


@dataclass(frozen=True)
class Lane:
    """What one replica did in one rollout, in columns of equal width; empty where nothing was recorded."""

    replica: str
    label: str
    batch: Ints
    """[columns] requests in decode by the engine's record, in flight by the balancer's where there is none."""
    k: Ints
    """[columns] draft length; -1: the drafter did not run, -2: nor did the engine. Empty without engine steps."""


def columns_for(lanes: int) -> int:
    """Columns of a lane, on a page of that many."""
    return max(100, min(PLOT, ALL_COLUMNS // max(1, lanes)))


def lanes_of(trace: RunTrace, step: RLStep, columns: int) -> list[Lane]:
    """Every replica's lane over the whole step (`start` to `finish`), sampled in the middle of each column."""
    at = step.start + (np.arange(columns) + 0.5) / columns * (step.finish - step.start)
    decoding = at <= step.end
    lanes = []
    for name in trace.replicas:
        engine = trace.engine(name)
        part = None if engine is None else engine.between(step.start, step.end)
        if part is None or not part.t.size:
            batch, k = sampled_load(step, name, at), np.empty(0, dtype=np.int64)
        else:
            batch, k = sampled_engine(part, at)
        lanes.append(Lane(name, trace.label(name), np.where(decoding, batch, 0), k))
    return lanes


def draw_lanes(trace: RunTrace, step: RLStep, lanes: Sequence[Lane]) -> Element:
    """The picture, below it what its colours mean."""
    layout = _Layout(len(lanes), step)
    most = max((int(lane.batch.max()) for lane in lanes), default=1) or 1
    kmax = max((int(lane.k.max()) for lane in lanes if lane.k.size), default=0)
    drawing = [layout.time_axis(), _waiting(layout, step), _batches(layout, lanes, most)]
    drawing += _draft_lengths(layout, lanes, kmax)
    drawing += _sessions(layout, step, lanes)
    drawing += _phases(layout, step, lanes, set(trace.run.standalone if trace.run else ()))
    drawing += [_notes(layout, step, lanes), _rollout_end(layout, step)]
    return element(
        "div",
        figure(WIDTH, layout.height, f"RL step {step.step}: every replica over time", *drawing),
        _key(step, lanes, most, kmax),
    )


class _Layout:
    """Where lanes and seconds are."""

    def __init__(self, lanes: int, step: RLStep) -> None:
        self.lanes, self.step = lanes, step
        self.pitch = 72 if lanes <= 4 else 36 if lanes <= 16 else 22
        self.load = round(self.pitch * 0.55)
        self.drafts = round(self.pitch * 0.31)
        self.height = TOP + lanes * self.pitch + BOTTOM
        self.chart = Chart((0, step.finish - step.start), (0, 1), self.height, LEFT, NOTES, TOP, BOTTOM)

    def x(self, unix_s: float) -> int:
        """Pixel of a moment, kept within the frame."""
        return round(self.chart.px(min(max(unix_s, self.step.start), self.step.finish) - self.step.start))

    def base(self, lane: int) -> int:
        """Bottom of a lane's upper strip."""
        return TOP + lane * self.pitch + self.load

    def floor(self, lane: int) -> int:
        """Bottom of a lane."""
        return self.base(lane) + self.drafts

    def box(self, lane: int, start: float, end: float) -> str:
        """Path over a lane's whole height."""
        x, width = self.x(start), max(1, self.x(end) - self.x(start))
        return f"M{x} {TOP + lane * self.pitch}h{width}v{self.load + self.drafts}h{-width}z"

    def time_axis(self) -> Element:
        """Ticks below, and above too where the lanes do not fit on a screen; lines through all lanes."""
        values = ticks(0, self.step.finish - self.step.start, 10)
        bottom = TOP + self.lanes * self.pitch
        lines = "".join(f"M{self.chart.px(v):.1f} {TOP}V{bottom}" for v in values)
        axis = self.chart.x_axis("seconds since the step began", values)
        axis.insert(0, element("path", d=lines, stroke=GRID))
        if self.lanes > 16:
            axis.extend(text(round(self.chart.px(v), 1), TOP - 6, f"{v:g}", anchor="middle") for v in values)
        return axis


def hatch() -> Element:
    """What training is filled with; once a page."""
    stripe = element("path", d="M0 6L6 0M-1 1L1 -1M5 7L7 5", stroke=ORANGE, stroke_width=1.2)
    pattern = element("pattern", element("rect", width=6, height=6, fill="#FBE3B0"), stripe, id="hatch", width=6,
                      height=6, patternUnits="userSpaceOnUse")  # fmt: skip
    return element("svg", element("defs", pattern), class_="defs", aria_hidden="true")


def _waiting(layout: _Layout, step: RLStep) -> Element:
    """All lanes, as long as the rollout: what is not drawn over is waiting."""
    return element("path", d="".join(layout.box(i, step.start, step.end) for i in range(layout.lanes)), fill=PALE)


def _batches(layout: _Layout, lanes: Sequence[Lane], most: int) -> Element:
    group = element("g", class_="load")
    for i, lane in enumerate(lanes):
        heights = np.ceil(lane.batch * layout.load / most).astype(np.int64)
        group.append(element("path", d=skyline(heights, LEFT, PLOT, layout.base(i)), fill=BLUE))
    return group


def _draft_lengths(layout: _Layout, lanes: Sequence[Lane], kmax: int) -> list[Element]:
    """A path for each draft length, over all lanes."""
    paths: dict[int, list[str]] = {}
    for i, lane in enumerate(lanes):
        for start, stop, k in runs(lane.k):
            height = max(2, round(layout.drafts * k / max(1, kmax)))
            x, end = (LEFT + round(PLOT * n / len(lane.k)) for n in (start, stop))
            if k > IDLE_ENGINE and end > x:
                paths.setdefault(k, []).append(f"M{x} {layout.floor(i)}h{end - x}v{-height}h{x - end}z")
    return [element("path", d="".join(d), fill=k_color(k, kmax), class_=f"k{k}") for k, d in sorted(paths.items())]


def _sessions(layout: _Layout, step: RLStep, lanes: Sequence[Lane]) -> list[Element]:
    drawn = []
    row = {lane.replica: i for i, lane in enumerate(lanes)}
    for s in (s for s in step.sessions if s.replica in row):
        i, words = row[s.replica], f"{s.end - s.start:.1f} s, {s.steps} steps"
        about = f"{lanes[i].label} trained the drafter: {words}, {s.tokens} tokens, {s.outcome}"
        drawn.append(element("path", element("title", about), d=layout.box(i, s.start, s.end), class_="training"))
        start, end = layout.x(s.start), layout.x(s.end)
        if len(words) * GLYPH + 8 < end - start:
            middle = TOP + i * layout.pitch + (layout.load + layout.drafts) / 2 + 4
            drawn.append(text((start + end) / 2, middle, words, anchor="middle", class_="halo"))
    return drawn


def _phases(layout: _Layout, step: RLStep, lanes: Sequence[Lane], apart: set[str]) -> list[Element]:
    """The policy's own phases, where it is trained: not on standalone replicas."""
    drawn = []
    for phase in (p for p in step.after if p.name in PHASES):
        name, color = PHASES[phase.name]
        boxes = [layout.box(i, phase.start, phase.end) for i, lane in enumerate(lanes) if lane.replica not in apart]
        about = element("title", f"{name}: {phase.end - phase.start:.2f} s")
        drawn.append(element("path", about, d="".join(boxes), fill=color, class_=phase.name))
    return drawn


def _notes(layout: _Layout, step: RLStep, lanes: Sequence[Lane]) -> Element:
    """Names on the left, seconds of bubble and training on the right."""
    group = element("g", class_="notes")
    for i, lane in enumerate(lanes):
        middle = TOP + i * layout.pitch + (layout.load + layout.drafts) / 2 + 4
        group.append(text(LEFT - 8, middle, shortened(lane.label, 15), anchor="end", class_="lane"))
        bubbles = [b for b in step.bubbles if b.replica == lane.replica]
        if not bubbles:
            continue
        idle = sum(b.end - b.start for b in bubbles)
        trained = sum(_within(s.start, s.end, b.start, b.end)
                      for b in bubbles for s in step.sessions if s.replica == lane.replica)  # fmt: skip
        words = f"bubble {idle:.1f} s" + (f", {trained:.1f} trained" if trained else "")
        group.append(text(WIDTH - NOTES + 8, middle, words, fill=MUTED))
    return group


def _rollout_end(layout: _Layout, step: RLStep) -> Element:
    x = layout.x(step.end)
    line = element("path", d=f"M{x} {TOP - 4}V{TOP + layout.lanes * layout.pitch}", class_="end")
    if layout.lanes > 16:
        return element("g", line)  # its seconds are in the key; the axis above has the place
    return element("g", line, text(x - 4, TOP - 8, f"rollout ends: {step.end - step.start:.1f} s", anchor="end"))


def _key(step: RLStep, lanes: Sequence[Lane], most: int, kmax: int) -> Element:
    """What the colours mean, as a list below the picture."""
    drafted = any(lane.k.size for lane in lanes)
    load = "requests in decode" if drafted else "requests in flight"
    entries = [(BLUE, f"{load}, full height: {most}"), (PALE, "waiting: a bubble")]
    entries.append(("training", "training the drafter"))
    used = sorted({int(k) for lane in lanes for k in np.unique(lane.k)} - {IDLE_ENGINE})
    entries += [(k_color(k, kmax), "drafter off" if k < 0 else f"K = {k}") for k in used]
    seconds: dict[str, float] = {}
    for phase in step.after:
        seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.end - phase.start
    entries += [(PHASES[n][1], f"{PHASES[n][0]} {s:.1f} s") for n, s in seconds.items() if n in PHASES]
    items = [("rollout", f"rollout {step.end - step.start:.1f} s"), *entries]
    return element("ul", *(_key_item(color, words) for color, words in items), class_="key")


def _key_item(color: str, words: str) -> Element:
    swatch = {"style": f"background:{color}"} if color.startswith("#") else {"class_": color}
    return element("li", element("i", **swatch), words)


def k_color(k: int, kmax: int) -> str:
    """Light to dark purple from 1 to `kmax`; greys for 0 and OFF."""
    if k <= 0:
        return OFF_COLOR if k < 0 else ZERO_COLOR
    share = (k - 1) / max(1, kmax - 1)
    light, dark = (250, 180, 200), (96, 0, 110)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(light, dark, strict=True))


def runs(values: npt.NDArray[np.int64]) -> Iterable[tuple[int, int, int]]:
    """Stretches of equal values: first index, index after the last, value."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(a, b, int(values[a])) for a, b in pairwise(edges) if b > a]


def skyline(heights: Ints, left: int, width: int, base: int) -> str:
    """Path of bars that stand side by side on `base`, as wide as `width` together, their heights in pixels."""
    path, at = [f"M{left} {base}"], 0
    for start, stop, height in runs(heights):
        x, end = (round(width * n / len(heights)) for n in (start, stop))
        if height != at:
            path.append(f"v{at - height}")
        path.append(f"h{end - x}")
        at = height
    return "".join([*path, f"V{base}z"]) if heights.any() else ""


def shortened(label: str, most: int) -> str:
    """At most so many characters: the end of an address tells replicas apart."""
    return label if len(label) <= most else "…" + label[-most + 1 :]


def _within(start: float, end: float, low: float, high: float) -> float:
    return max(0.0, min(end, high) - max(start, low))
