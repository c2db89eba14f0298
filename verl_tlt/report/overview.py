"""The run as a whole, over its RL steps: seconds saved and lost, acceptance, reward. A click on a step leads to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from verl_tlt.report.lanes import BLUE, GREEN, ORANGE, RED, k_color
from verl_tlt.report.steps import Saving
from verl_tlt.report.summary import StepRow
from verl_tlt.report.svg import MUTED, WIDTH, Chart, element, figure, spread, text, ticks, whole_ticks

LABEL_GAP = 13
"""Pixels between the labels of two lines."""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    color: str
    points: Sequence[tuple[int, float | None]]
    """RL step and value; None leaves a gap."""
    dashed: bool = False


def saving_chart(savings: Sequence[Saving]) -> Element:
    """Bars by step: above the line what was saved, below what was lost to speculation and to TLT's own work."""
    up = max([0.0, *(s.saved_s or 0.0 for s in savings)])
    down = max([0.0, *(s.work_s + max(0.0, -(s.saved_s or 0.0)) for s in savings)])
    chart = Chart(_steps_range([s.step for s in savings]), (-down * 1.05, up * 1.08 or 1.0), 230, right=20)
    drawing = [*_axes(chart, "seconds")]
    width = max(1.0, min(26.0, 0.8 * (chart.px(1) - chart.px(0))))
    for s in savings:
        middle, zero = chart.px(s.step), chart.py(0)
        bars, below = [], zero
        saved = s.saved_s or 0.0
        if saved > 0:
            bars.append(_bar(middle, width, chart.py(saved), zero, GREEN, "saved"))
        elif saved < 0:
            below = chart.py(saved)
            bars.append(_bar(middle, width, zero, below, RED, "slower"))
        if s.work_s > 0:
            bars.append(_bar(middle, width, below, below + chart.py(0) - chart.py(s.work_s), ORANGE, "work"))
        drawing.append(_linked(chart, s.step, said(s), *bars))
    return figure(WIDTH, chart.height, "seconds saved and lost by RL step", *drawing)


def said(s: Saving) -> str:
    """One step's account in words."""
    if s.saved_s is None:
        return f"step {s.step}: savings not measured, own work {s.work_s:.2f} s"
    word = "saved" if round(s.saved_s, 2) >= 0 else "lost"
    return f"step {s.step}: {word} {abs(s.saved_s):.2f} s, own work {s.work_s:.2f} s, net {s.net_s:+.2f} s"


def sum_chart(savings: Sequence[Saving]) -> Element | None:
    """The net seconds summed up to each step; a step that was not measured adds its own work only."""
    total, points = 0.0, []
    for s in savings:
        total += (s.saved_s or 0.0) - s.work_s
        points.append((s.step, total))
    return line_chart("net seconds saved so far", "seconds", [Line("net", BLUE, points)], height=190, zero=True)


def acceptance_lines(metrics: Mapping[int, Mapping[str, float]]) -> list[Line]:
    """By draft position, the share of drafts accepted up to there in each step."""
    positions = max((acceptance(m)[-1][0] for m in metrics.values() if acceptance(m)), default=0)
    return [
        Line(f"position {i}", k_color(i, positions), [(s, m.get(_position(i))) for s, m in metrics.items()])
        for i in range(1, positions + 1)
    ]


def acceptance(metrics: Mapping[str, float]) -> list[tuple[int, float]]:
    """Draft positions of one step and the share of drafts accepted up to each."""
    prefix = _position("")
    found = [(int(n.removeprefix(prefix)), v) for n, v in metrics.items() if n.startswith(prefix)]
    return sorted(found)


def accept_length_lines(
    rows: Sequence[StepRow], initial: Mapping[int, float], warm: Sequence[StepRow] | None
) -> list[Line]:
    """Accept length by step, beside the first drafter's had nobody trained it and a run that began with this one's."""
    lines = [Line("this run", BLUE, [(r.step, r.accept_length) for r in rows])]
    if initial:
        lines.append(Line("never trained", MUTED, sorted(initial.items()), dashed=True))
    if warm:
        lines.append(Line("started trained", ORANGE, [(r.step, r.accept_length) for r in warm]))
    return lines


def reward_lines(rows: Sequence[StepRow], stock: Sequence[StepRow] | None) -> list[Line]:
    """Mean reward by step, with stock verl's beside it."""
    lines = [Line("with verl-tlt", BLUE, [(r.step, r.reward) for r in rows])]
    return [*lines, Line("stock verl", MUTED, [(r.step, r.reward) for r in stock], dashed=True)] if stock else lines


def line_chart(
    title: str, unit: str, lines: Sequence[Line], height: float = 230, zero: bool = False, low: float | None = None
) -> Element | None:
    """Lines over RL steps, each labelled at its end; None where no line has a value. `zero`: the axis includes 0."""
    lines = [line for line in lines if any(y is not None for _, y in line.points)]
    values = [y for line in lines for _, y in line.points if y is not None]
    if not values:
        return None
    bottom, top = min([*values, *([0.0] if zero else []), *([low] if low is not None else [])]), max(values)
    margin = 0.08 * ((top - bottom) or abs(top) or 1.0)
    steps = [x for line in lines for x, _ in line.points]
    chart = Chart(_steps_range(steps), (bottom if bottom in (0.0, low) else bottom - margin, top + margin), height,
                  right=150)  # fmt: skip
    drawing = [*_axes(chart, unit)]
    ends = []
    for line in lines:
        dash = "6 4" if line.dashed else None
        drawing.append(element("path", d=chart.line(line.points), fill="none", stroke=line.color, stroke_width=2,
                               stroke_dasharray=dash))  # fmt: skip
        known = [(x, y) for x, y in line.points if y is not None]
        if len(known) <= 60:
            drawing += [_dot(chart, x, y, line, title) for x, y in known]
        ends.append(chart.py(known[-1][1]))
    for line, at in zip(lines, spread(ends, LABEL_GAP), strict=True):
        value = next(y for _, y in reversed(line.points) if y is not None)
        words = f"{line.label}: {value:.2f}"
        drawing.append(text(chart.width - chart.right + 8, at + 4, words, class_="label"))
    return figure(WIDTH, chart.height, title, *drawing)


def _dot(chart: Chart, x: int, y: float, line: Line, title: str) -> Element:
    about = element("title", f"step {x}, {line.label}: {y:.3f} ({title})")
    dot = element("circle", about, cx=round(chart.px(x), 1), cy=round(chart.py(y), 1), r=3.2, fill=line.color)
    return element("a", dot, href=f"#step-{x}")


def _linked(chart: Chart, step: int, about: str, *drawn: Element) -> Element:
    """A step's part of a chart, from top to bottom, leading to the step."""
    left, right = chart.px(step - 0.5), chart.px(step + 0.5)
    area = element("rect", x=round(left, 1), y=chart.top, width=round(right - left, 1),
                   height=chart.height - chart.top - chart.bottom, fill="transparent")  # fmt: skip
    return element("a", element("title", about), area, *drawn, href=f"#step-{step}")


def _bar(middle: float, width: float, top: float, bottom: float, color: str, kind: str) -> Element:
    return element("rect", x=round(middle - width / 2, 1), y=round(top, 1), width=round(width, 1),
                   height=round(max(0.0, bottom - top), 1), fill=color, class_=kind)  # fmt: skip


def _axes(chart: Chart, unit: str) -> list[Element]:
    return [
        chart.y_axis(unit, ticks(*chart.y, 5)),
        chart.x_axis("RL step", [t for t in whole_ticks(*chart.x) if chart.x[0] <= t <= chart.x[1]]),
    ]


def _steps_range(steps: Sequence[int]) -> tuple[float, float]:
    return min(steps, default=1) - 0.5, max(steps, default=1) + 0.5


def _position(i: int | str) -> str:
    return f"tlt/accept_rate_pos_{i}"
