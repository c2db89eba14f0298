"""A run as one HTML page that needs nothing else: no scripts, no network, pictures inline as SVG."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_tlt.report import picture
from verl_tlt.report.reader import RunTrace
from verl_tlt.report.summary import COLUMNS, StepRow, cells, ratio

MAX_DRAFT_LENGTH = 3
"""Draft length in the serve command when the trace does not tell the run's."""

CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
svg { width: 100%; height: auto; }
.facts { display: flex; flex-wrap: wrap; gap: 1rem; padding: 0; }
.facts li { list-style: none; border: 1px solid #ddd; border-radius: 6px; padding: .6rem 1rem; }
.facts b { display: block; font-size: 1.5rem; color: #0072B2; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e5e5e5; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
p { max-width: 46rem; }
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
        return cls(run.policy, run.drafter, int(speculation.get("max_draft_length", MAX_DRAFT_LENGTH)))

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
    drawn = picture.pick_step(trace)
    last = max(p.step for p in trace.phases if p.name == "rollout")
    parts = [
        "<h1>verl-tlt: what one run did</h1>",
        _facts(rows, stock, warm),
        "<h2>Replicas over time, and acceptance</h2>",
        f"<p>RL step {drawn}, the one with the most training in its bubble: each lane is a replica and its GPU worker."
        " Blue is the number of requests it decodes, hatched is training of the drafter while others still decode.</p>",
        picture.to_svg(picture.main_figure(trace, rows, warm)),
        "<h2>Steps</h2>",
        _table(rows),
    ]
    if (figure := picture.draft_length_figure(trace, last)) is not None:
        parts += [
            "<h2>Draft length against load</h2>",
            f"<p>RL step {last}, the last one. The draft length is chosen before each engine step, from the measured"
            " cost of a step and the measured acceptance; 0 drafts nothing, off skips the drafter altogether.</p>",
            picture.to_svg(figure),
        ]
    parts += ["<h2>Reward</h2>", picture.to_svg(picture.reward_figure(rows, stock))]
    for title, other in (("Stock verl, same seed", stock), ("Started with the trained drafter", warm)):
        if other:
            parts += [f"<h2>{title}</h2>", _table(other)]
    if serving is not None:
        parts += ["<h2>Serve the drafter</h2>", f"<pre>{html.escape(serving.command())}</pre>"]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{CSS}</style>'
    start = f'<!DOCTYPE html>\n<html lang="en"><head><title>verl-tlt run</title>{head}</head>'
    page = f"{start}\n<body>\n{body}\n</body></html>\n"
    Path(path).write_text(page, encoding="utf-8")
    return Path(path)


def _facts(rows: Sequence[StepRow], stock: Sequence[StepRow] | None, warm: Sequence[StepRow] | None) -> str:
    """The numbers people ask for first; what was not measured is left out."""
    facts: list[tuple[str, str]] = []
    lengths = [r.accept_length for r in rows if r.accept_length is not None]
    if lengths:
        facts.append((f"{lengths[0]:.2f} → {lengths[-1]:.2f}", "accept length, first to last step"))
    bubble = sum(r.bubble_s or 0.0 for r in rows)
    if bubble:
        trained = sum(r.bubble_trained_s or 0.0 for r in rows)
        facts.append((f"{trained / bubble:.0%}", f"of {bubble:.0f} s of bubbles trained the drafter"))
    overhead = [r.overhead_s for r in rows if r.overhead_s is not None]
    if overhead:
        facts.append((f"{sum(overhead) / len(overhead):.2f} s", "of TLT's own work on a step's critical path"))
    if stock:
        for name, run, column in (
            ("rollout", rows, "rollout_s"),
            ("whole step", rows, "step_s"),
            ("rollout with the trained drafter", warm or (), "rollout_s"),
        ):
            if (found := ratio(stock, run, column)) is not None:
                spread = f"{found.low:.2f} to {found.high:.2f} step by step"
                facts.append((f"{found.mean:.2f}x", f"{name} against stock, per token ({spread})"))
    items = "".join(f"<li><b>{html.escape(value)}</b>{html.escape(text)}</li>" for value, text in facts)
    return f'<ul class="facts">{items}</ul>'


def _table(rows: Sequence[StepRow]) -> str:
    text = [cells(row) for row in rows]
    filled = [i for i in range(len(COLUMNS)) if any(line[i] != "-" for line in text)]
    headings = [heading for heading, _ in COLUMNS.values()]
    head = "".join(f"<th>{html.escape(headings[i])}</th>" for i in filled)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(line[i])}</td>" for i in filled) + "</tr>" for line in text)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
