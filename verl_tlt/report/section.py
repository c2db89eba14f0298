"""One RL step of the page: its account, its lanes, acceptance by position, training and what became of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from verl_tlt.report.lanes import columns_for, draw_lanes, k_color, lanes_of
from verl_tlt.report.overview import acceptance
from verl_tlt.report.reader import RunTrace
from verl_tlt.report.steps import RLStep, Saving
from verl_tlt.report.svg import Chart, element, figure, text, ticks

OVERHEAD, LENGTH = "tlt/overhead_", "tlt/draft_length_frac_"
LENGTHS = {
    "tlt/accept_length": "accept length",
    "tlt/accept_length_tail": "accept length of the longest tenth",
    "tlt/tokens_per_pass": "tokens per pass",
}


def step_section(trace: RunTrace, step: RLStep, saving: Saving, neighbours: tuple[int | None, int | None], of: int,
                 first: bool) -> Element:  # fmt: skip
    """A section that shows when its link is followed; `first`: also while no link has been.

    Args:
        trace: the run.
        step: what to show.
        saving: the step's seconds.
        neighbours: the steps before and after, None at the ends.
        of: how many steps the page holds, which decides how finely lanes are drawn.
        first: whether this is the step that a fresh page shows.
    """
    lanes = lanes_of(trace, step, columns_for(of * len(trace.replicas)))
    before, after = neighbours
    links = element("p", _link(before, "← previous"), " ", _link(after, "next →"), " ",
                    element("a", "all steps", href="#steps"), class_="turn")  # fmt: skip
    charts = element("div", _acceptance(step), _draft_lengths(step), class_="pair")
    parts = [draw_lanes(trace, step, lanes), charts, _sessions(trace, step)]
    heading = element("h3", f"RL step {step.step}")
    body = [heading, links, _facts(step, saving), *parts, _drafter(trace, step)]
    return element("section", *body, id=f"step-{step.step}", class_="step first" if first else "step")


def table(headings: Sequence[str], rows: Sequence[Sequence[str | Element]]) -> Element:
    """A table that scrolls where it is too wide."""
    body = [element("tr", *(_cell(cell) for cell in row)) for row in rows]
    head = element("tr", *(element("th", heading, scope="col") for heading in headings))
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="scroll")


def _cell(content: str | Element) -> Element:
    """Long text wraps, numbers do not."""
    return element("td", content, class_="words" if isinstance(content, str) and len(content) > 24 else None)


def facts(found: Sequence[tuple[str, str]]) -> Element:
    """Numbers with a word to each."""
    return element("ul", *(element("li", element("b", value), words) for value, words in found), class_="facts")


def _link(step: int | None, words: str) -> Element:
    return element("span", words) if step is None else element("a", words, href=f"#step-{step}")


def _facts(step: RLStep, saving: Saving) -> Element:
    found = [(f"{step.end - step.start:.1f} s", "rollout")]
    if saving.saved_s is not None and saving.net_s is not None:
        word = "saved in rollout" if round(saving.saved_s, 2) >= 0 else "lost in rollout"
        found.append((f"{abs(saving.saved_s):.2f} s", word))
    parts = [(n.removeprefix(OVERHEAD).removesuffix("_s"), v) for n, v in step.metrics.items()
             if n.startswith(OVERHEAD) and n != f"{OVERHEAD}s"]  # fmt: skip
    if parts:
        listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts)
        found.append((f"{sum(v for _, v in parts):.2f} s", f"TLT's own work: {listed}"))
    if saving.net_s is not None:
        found.append((f"{saving.net_s:+.2f} s", "net"))
    for name, words in LENGTHS.items():
        if name in step.metrics:
            found.append((f"{step.metrics[name]:.2f}", words))
    if step.bubbles:
        found.append((f"{sum(b.end - b.start for b in step.bubbles):.1f} s", "of bubbles, all replicas together"))
    return facts(found)


def _acceptance(step: RLStep) -> Element | None:
    found = acceptance(step.metrics)
    if not found:
        return None
    bars = [(str(i), share, k_color(i, len(found))) for i, share in found]
    return _bars("Accepted up to draft position", "share of drafts", bars)


def _draft_lengths(step: RLStep) -> Element | None:
    shares = {int(n.removeprefix(LENGTH)): v for n, v in step.metrics.items() if n.startswith(LENGTH)}
    if not shares:
        return None
    shares[-1] = step.metrics.get("tlt/drafter_off_frac", 0.0)
    kmax = max(shares)
    bars = [("off" if k < 0 else str(k), share, k_color(k, kmax)) for k, share in sorted(shares.items())]
    return _bars("Draft length K", "share of engine steps", bars)


def _bars(title: str, unit: str, bars: Sequence[tuple[str, float, str]]) -> Element:
    chart = Chart((-0.5, len(bars) - 0.5), (0, 1), 190, left=50, right=10, top=26, width=520)
    drawing = [text(50, 14, title, class_="title"), chart.y_axis(unit, ticks(0, 1, 4))]
    axis = element("g", class_="axis")
    width = min(48.0, 0.7 * (chart.px(1) - chart.px(0)))
    for i, (name, share, color) in enumerate(bars):
        x, y = chart.px(i), chart.py(share)
        drawing.append(element("rect", x=round(x - width / 2, 1), y=round(y, 1), width=round(width, 1),
                               height=round(chart.py(0) - y, 1), fill=color))  # fmt: skip
        drawing.append(text(round(x, 1), round(y - 4, 1), f"{share:.0%}", anchor="middle", class_="value"))
        axis.append(text(round(x, 1), chart.height - 22, name, anchor="middle"))
    return figure(chart.width, chart.height, f"{title}, {unit}", *drawing, axis)


def _sessions(trace: RunTrace, step: RLStep) -> Element | None:
    if not step.sessions:
        return None
    rows = [
        [trace.label(s.replica), f"{s.start - step.start:.1f}", f"{s.end - s.start:.1f}", str(s.steps), str(s.tokens),
         "" if math.isnan(s.loss) else f"{s.loss:.2f}", " ".join(f"{a:.2f}" for a in s.acc), s.outcome,
         s.error or ""]
        for s in step.sessions
    ]  # fmt: skip
    head = ["replica", "from s", "seconds", "steps", "tokens", "loss", "accuracy by position", "outcome", "error"]
    keep = [i for i in range(len(head)) if any(row[i] for row in rows)]
    shown = table([head[i] for i in keep], [[row[i] for i in keep] for row in rows])
    count = f"{len(rows)} training session{'s' if len(rows) > 1 else ''}"
    return element("details", element("summary", count), shown)


def _drafter(trace: RunTrace, step: RLStep) -> Element | None:
    """What became of the merged drafter, in a sentence each."""
    words = []
    if (p := step.publish) is not None:
        words.append(f"Drafter v{p.version} {p.decision}" + (f": {p.reason}." if p.reason else "."))
        tau = ", ".join(f"{name} {value:.2f}" for name, value in p.tau.items() if value is not None)
        words += [f"Accept length on held-out text: {tau}."] if tau else []
    failed = [trace.label(r.replica) for r in step.reloads if not r.ok]
    words += [f"Not loaded by {', '.join(failed)}."] if failed else []
    return element("p", " ".join(words)) if words else None
