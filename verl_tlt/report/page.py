"""A run as one HTML page that needs nothing else: no script, no network, no library to open or to write it.

A step is chosen by following a link: the page's style shows the section that the address ends with. Plotly was the
alternative: 5 MB of script in every page and a dependency of 20 MB, against files that the browser draws at once and
that a locked-down viewer shows too.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element

from verl_tlt.report.lanes import GREEN, ORANGE, RED, hatch
from verl_tlt.report.overview import (
    accept_length_lines,
    acceptance_lines,
    line_chart,
    reward_lines,
    saving_chart,
    sum_chart,
)
from verl_tlt.report.reader import RunTrace
from verl_tlt.report.section import facts, step_section, table
from verl_tlt.report.steps import RLStep, Saving, most_trained, rl_steps, saving
from verl_tlt.report.summary import COLUMNS, StepRow, cells, initial_lengths, ratio
from verl_tlt.report.svg import element, markup
from verl_tlt.trace.events import Stopped

MAX_DRAFT_LENGTH = 3
"""Draft length in the serve command when the trace does not tell the run's."""

CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem 0; }
main { max-width: 1100px; margin: 0 auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.4rem; }
h3 { font-size: 1.05rem; margin-bottom: .3rem; }
a { color: #0072B2; } p { max-width: 48rem; }
svg { display: block; width: 100%; height: auto; font-size: 11px; fill: #222; }
svg .axis, svg .lane, svg .label, svg .notes { font-size: 11px; } svg .title { font-size: 13px; font-weight: 600; }
svg .axis text { fill: #555; } svg a:hover rect, svg a:focus rect { opacity: .7; }
svg .halo { paint-order: stroke; stroke: #fff; stroke-width: 4px; }
svg .end { stroke: #222; stroke-dasharray: 4 3; fill: none; }
svg .training { fill: url(#hatch); stroke: #B97A00; stroke-width: 1.2; }
.scroll { overflow-x: auto; }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
.facts, .key { display: flex; flex-wrap: wrap; padding: 0; list-style: none; }
.facts { gap: .8rem; } .facts li { border: 1px solid #ddd; border-radius: 6px; padding: .5rem .9rem; max-width: 17rem; }
.facts b { display: block; font-size: 1.4rem; color: #0072B2; } section .facts b { font-size: 1.1rem; }
.key { gap: .2rem 1.1rem; font-size: .85rem; margin: .3rem 0 1rem; }
.key i { display: inline-block; width: .9rem; height: .9rem; margin-right: .4rem; vertical-align: -2px; }
.key .training { background: repeating-linear-gradient(135deg, #E69F00 0 2px, #fbe3b0 2px 6px); }
.key .rollout { width: 0; border-left: 2px dashed #222; background: none; }
.defs { position: absolute; width: 0; height: 0; }
.steps { max-height: 8rem; overflow-y: auto; } .steps a { display: inline-block; min-width: 1.6rem; padding: 0 .3rem; }
.step { display: none; } .step:target { display: block; }
main:not(:has(.step:target)) .first { display: block; }
.turn span { color: #999; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e5e5e5; }
td { white-space: nowrap; } td.words { white-space: normal; overflow-wrap: anywhere; text-align: left; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
@media print { .step { display: block; } }
"""


@dataclass(frozen=True)
class Serving:
    """What `vllm serve` needs to use the drafter."""

    policy: str
    drafter: str
    draft_length: int

    @classmethod
    def of_trace(cls, trace: RunTrace) -> Serving | None:
        """From the run's own record; None if the run kept no drafter."""
        run = trace.run
        if run is None or not run.policy or not run.drafter:
            return None
        speculation = run.config.get("speculation", {})
        return cls(run.policy, run.drafter, int(speculation.get("max_draft_length") or MAX_DRAFT_LENGTH))

    def command(self) -> str:
        """The shell command; drafts are sampled, which is what makes them acceptable at temperature 1."""
        config = {
            "method": "eagle3",
            "model": self.drafter,
            "num_speculative_tokens": self.draft_length,
            "draft_sample_method": "probabilistic",
        }
        return f"vllm serve {shlex.quote(self.policy)} --speculative-config {shlex.quote(json.dumps(config))}"


def write_report(
    path: str | Path,
    trace: RunTrace,
    rows: Sequence[StepRow],
    *,
    stock: Sequence[StepRow] | None = None,
    warm: Sequence[StepRow] | None = None,
    serving: Serving | None = None,
) -> Path:
    """Write the page; `stock` and `warm` are the other two runs of a comparison. Returns the path.

    Raises:
        TraceError: the trace holds no finished rollout.
    """
    steps = rl_steps(trace)
    savings = [saving(s, metrics) for s, metrics in trace.steps.items()]
    parts: list[Element | None] = [
        element("h1", "verl-tlt: what one run did"),
        facts(_facts(rows, savings, stock, warm)),
        *_savings(savings),
        *_stops(trace.stops),
        *_charts(trace, rows, stock, warm),
        element("h2", "Steps", id="steps"),
        _table(rows, linked=set(steps)),
        element("h2", "One step, every replica"),
        _chooser(steps),
        *_sections(trace, steps),
    ]
    for title, other in (("Stock verl, same seed", stock), ("Started with the trained drafter", warm)):
        parts += [element("h2", title), _table(other)] if other else []
    parts += [element("h2", "Serve the drafter"), element("pre", serving.command())] if serving else []
    head = element("head", element("meta", charset="utf-8"),
                   element("meta", name="viewport", content="width=device-width"),
                   element("title", "verl-tlt run"), element("style", CSS))  # fmt: skip
    page = element("html", head, element("body", hatch(), element("main", *parts)), lang="en")
    Path(path).write_text(f"<!DOCTYPE html>\n{markup(page)}\n", encoding="utf-8", errors="replace")
    return Path(path)


def _facts(
    rows: Sequence[StepRow],
    savings: Sequence[Saving],
    stock: Sequence[StepRow] | None,
    warm: Sequence[StepRow] | None,
) -> list[tuple[str, str]]:
    """The numbers people ask for first; what was not measured is left out."""
    found: list[tuple[str, str]] = []
    measured = [s for s in savings if s.saved_s is not None]
    work = sum(s.work_s for s in savings)
    if measured:
        saved = sum(s.saved_s or 0.0 for s in measured)
        rollouts = sum(r.rollout_s or 0.0 for r in rows)
        share = f", {(saved - work) / rollouts:+.1%} of {rollouts:.0f} s of rollouts" if rollouts else ""
        found.append((f"{saved - work:+.1f} s", f"net: saved less own work{share}"))
        found.append((f"{saved:.1f} s", f"saved in rollout, in {len(measured)} of {len(savings)} steps measured"))
    if work:
        found.append((f"{work:.1f} s", "lost to TLT's own work on the critical path"))
    lengths = [r.accept_length for r in rows if r.accept_length is not None]
    if lengths:
        found.append((f"{lengths[0]:.2f} → {lengths[-1]:.2f}", "accept length, first to last step"))
    bubble = sum(r.bubble_s or 0.0 for r in rows)
    if bubble:
        trained = sum(r.bubble_trained_s or 0.0 for r in rows)
        found.append((f"{trained / bubble:.0%}", f"of {bubble:.0f} s of bubbles trained the drafter"))
    return found + (_against(stock, rows, warm) if stock else [])


def _against(
    stock: Sequence[StepRow], rows: Sequence[StepRow], warm: Sequence[StepRow] | None
) -> list[tuple[str, str]]:
    """How many times faster than stock."""
    found = []
    for name, run, column in (
        ("rollout", rows, "rollout_s"),
        ("whole step", rows, "step_s"),
        ("rollout with the trained drafter", warm or (), "rollout_s"),
    ):
        if (times := ratio(stock, run, column)) is not None:
            spread = f"{times.low:.2f} to {times.high:.2f} step by step"
            found.append((f"{times.mean:.2f}x", f"{name} against stock, per token ({spread})"))
    return found


def _savings(savings: Sequence[Saving]) -> list[Element | None]:
    heading = element("h2", "What did it save?")
    if not any(s.saved_s is not None for s in savings):
        why = "No step says what TLT saved: no cost of a step without the drafter is known. A calibration"
        return [heading, element("p", f"{why} (tlt.speculation.calibrate) measures it.")]
    explained = (
        "Above the line the seconds by which a rollout ended before stock decoding would have, an estimate "
        "from measured step costs; below it what drafts, and training beside decoding, lost and TLT's own work. "
        "A bar leads to its step."
    )
    key = [(GREEN, "saved in rollout"), (RED, "lost in rollout"), (ORANGE, "own work")]
    items = [element("li", element("i", style=f"background:{color}"), words) for color, words in key]
    return [heading, element("p", explained), saving_chart(savings), element("ul", *items, class_="key"),
            element("h3", "Summed up"), sum_chart(savings)]  # fmt: skip


def _stops(stops: Sequence[Stopped]) -> list[Element]:
    """When speculation was stopped and why, and when it went on."""
    lines = [f"After step {s.step} " + (f"it was stopped: {s.cause}." if s.cause else "it went on.") for s in stops]
    items = [element("li", line) for line in lines]
    return [element("h3", "Speculation that did not pay"), element("ul", *items)] if items else []


def _charts(
    trace: RunTrace, rows: Sequence[StepRow], stock: Sequence[StepRow] | None, warm: Sequence[StepRow] | None
) -> list[Element | None]:
    """Acceptance and reward over the run; a chart without a value is left out with its heading."""
    drawn: list[Element | None] = []
    for title, unit, lines, low in (
        ("Accept length", "tokens per draft", accept_length_lines(rows, initial_lengths(trace), warm), 1.0),
        ("Acceptance by draft position", "share of drafts", acceptance_lines(trace.steps), 0.0),
        ("Reward", "mean reward", reward_lines(rows, stock), None),
    ):
        chart = line_chart(title, unit, lines, low=low)
        drawn += [] if chart is None else [element("h2", title), chart]
    return drawn


def _chooser(steps: Mapping[int, RLStep]) -> Element:
    links = [element("a", str(step), href=f"#step-{step}") for step in steps]
    return element("nav", "RL step ", *links, class_="steps")


def _sections(trace: RunTrace, steps: Mapping[int, RLStep]) -> list[Element]:
    numbers, first = list(steps), most_trained(steps)
    return [
        step_section(trace, steps[n], saving(n, steps[n].metrics), (before, after), len(steps), n == first)
        for before, n, after in zip([None, *numbers], numbers, [*numbers[1:], None], strict=False)
    ]


def _table(rows: Sequence[StepRow], linked: Collection[int] = ()) -> Element:
    lines = [cells(row) for row in rows]
    filled = [i for i in range(len(COLUMNS)) if any(line[i] != "-" for line in lines)]
    headings = [heading for heading, _ in COLUMNS.values()]
    body: list[list[str | Element]] = []
    for row, line in zip(rows, lines, strict=True):
        shown: list[str | Element] = [line[i] for i in filled]
        if row.step in linked:
            shown[0] = element("a", line[0], href=f"#step-{row.step}")
        body.append(shown)
    return table([headings[i] for i in filled], body)
