"""Elements of the page: HTML and SVG as trees of the standard library, and a chart to draw on.

A tree is escaped when it is written, so no name, reason or error of a run can become markup. One unit of an SVG is one
CSS pixel at the page's full width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element, tostring

INK, MUTED, GRID = "#222222", "#666666", "#DDDDDD"
WIDTH = 1100
GLYPH = 6.2
"""Width of a character at 11 pixels, about: to tell whether a label fits."""

Child = Element | str | None


def element(tag: str, *children: Child, **attributes: str | float | None) -> Element:
    """An element; `class_` is written `class`, `font_size` is `font-size`, None is left out."""
    made = Element(tag, {k.rstrip("_").replace("_", "-"): _text(v) for k, v in attributes.items() if v is not None})
    for child in children:
        if isinstance(child, str):
            if len(made):
                made[-1].tail = (made[-1].tail or "") + child
            else:
                made.text = (made.text or "") + child
        elif child is not None:
            made.append(child)
    return made


def markup(root: Element) -> str:
    """The tree as HTML, escaped."""
    return tostring(root, encoding="unicode", method="html")


def figure(width: float, height: float, title: str, *children: Child) -> Element:
    """An `<svg>` with a name for screen readers; wider than a narrow window, it scrolls."""
    drawing = element("svg", element("title", title), *children, viewBox=f"0 0 {width:g} {height:g}", role="img")
    drawing.set("style", f"min-width:{min(width, 700):g}px")
    return element("div", drawing, class_="scroll")


def text(x: float, y: float, words: str, **attributes: str | float | None) -> Element:
    """A label; `anchor` is start (default), middle or end."""
    anchor = attributes.pop("anchor", None)
    return element("text", words, x=x, y=y, text_anchor=anchor, **attributes)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers within [low, high]: steps of 1, 2 or 5 times a power of ten, `most` of them or fewer.

    >>> ticks(0, 23)
    [0.0, 5.0, 10.0, 15.0, 20.0]
    """
    if not high > low:
        return [low]
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(m * power for m in (1, 2, 5, 10, 20) if m * power >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def whole_ticks(low: float, high: float, most: int = 12) -> list[float]:
    """`ticks` without fractions."""
    return sorted({float(round(t)) for t in ticks(low, high, most)})


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions at least `gap` apart, in the order of `wanted` and near it: labels that would cover each other."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    for before, i in pairwise(order):
        placed[i] = max(placed[i], placed[before] + gap)
    return placed


@dataclass(frozen=True)
class Chart:
    """A frame with two axes: numbers to pixels, ticks, lines."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: float
    left: float = 64
    right: float = 90
    top: float = 14
    bottom: float = 40
    width: float = WIDTH

    def px(self, x: float) -> float:
        """Pixel of a value on the x axis."""
        low, high = self.x
        return self.left + (x - low) / ((high - low) or 1.0) * (self.width - self.left - self.right)

    def py(self, y: float) -> float:
        """Pixel of a value on the y axis; up is more."""
        low, high = self.y
        return self.height - self.bottom - (y - low) / ((high - low) or 1.0) * (self.height - self.top - self.bottom)

    def x_axis(self, label: str, values: Iterable[float]) -> Element:
        """Ticks and label below the frame."""
        base = self.height - self.bottom
        group = element("g", class_="axis")
        for value in values:
            at = self.px(value)
            group.append(element("path", d=f"M{at:.1f} {base:.1f}v4", stroke=MUTED))
            group.append(text(round(at, 1), base + 16, f"{value:g}", anchor="middle"))
        group.append(text((self.left + self.width - self.right) / 2, self.height - 6, label, anchor="middle"))
        return group

    def y_axis(self, label: str, values: Iterable[float]) -> Element:
        """Ticks with lines across the frame, and the label beside them."""
        group = element("g", class_="axis")
        for value in values:
            at = round(self.py(value), 1)
            end = self.width - self.right
            group.append(element("path", d=f"M{self.left} {at}H{end:g}", stroke=GRID if value else MUTED))
            group.append(text(self.left - 7, at + 4, f"{value:g}", anchor="end"))
        middle = (self.top + self.height - self.bottom) / 2
        group.append(text(14, middle, label, anchor="middle", transform=f"rotate(-90 14 {middle:g})"))
        return group

    def line(self, points: Sequence[tuple[float, float | None]]) -> str:
        """Path through the points; None interrupts it."""
        path, pen = [], "M"
        for x, y in points:
            if y is None:
                pen = "M"
                continue
            path.append(f"{pen}{self.px(x):.1f} {self.py(y):.1f}")
            pen = "L"
        return "".join(path)


def _text(value: str | float | None) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
