"""Writes a traced run as one HTML page that loads nothing and runs no script.

The template escapes whatever a trace says; charts are images, in which a browser runs nothing either.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from verl_tlt.commands.report.figures import run_charts, step_chart
from verl_tlt.commands.report.reader import RunTrace
from verl_tlt.commands.report.steps import most_trained, rl_steps, rows_of_trace, sentences, table
from verl_tlt.errors import printable
from verl_tlt.files.disk import replacing

LONGEST_TEXT = 2000
"""Characters of a text from the trace that the page shows."""


def write_page(path: Path, trace: RunTrace) -> Path:
    """Write the page and return its path; a `TraceError` says that the trace holds no finished rollout."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["plain"] = plain
    steps = rl_steps(trace)
    shown = [steps[number] for number in sorted({min(steps), most_trained(steps), max(steps)})]
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    page = template.render(
        heading=trace.run.name if trace.run and trace.run.name else "one run",
        about=about(trace),
        sentences=list(sentences(trace)),
        charts=[*run_charts(trace), *(step_chart(trace, step) for step in shown)],
        tables=list(_tables(trace)),
        command=serve_command(trace),
    )
    with replacing(path) as file:
        file.write(page.encode("utf-8", "backslashreplace"))
    return path


def serve_command(trace: RunTrace) -> str:
    """The shell command that serves the policy with the run's drafter; empty where it kept none.

    Drafts are sampled, since greedy ones are accepted less often at temperature 1. An MTP head is put into the policy's
    directory first, where vLLM looks for it.
    """
    run = trace.run
    if run is None or not run.policy or not run.drafter:
        return ""
    speculation, settings = (
        section if isinstance(section := run.config.get(name), Mapping) else {} for name in ("speculation", "drafter")
    )
    drafter, policy = shlex.quote(run.drafter), shlex.quote(run.policy)
    own = settings.get("method") == "mtp"
    config = {
        **({"method": "mtp"} if own else {"method": "eagle3", "model": run.drafter}),
        "num_speculative_tokens": speculation.get("max_draft_length") or 3,
        "draft_sample_method": "probabilistic",
    }
    serve = f"vllm serve {policy} --speculative-config {shlex.quote(json.dumps(config))}"
    return f"verl-tlt write-back {drafter} {policy} && {serve}" if own else serve


def plain(text: str) -> str:
    """The text without control characters, shortened where it is very long."""
    return printable(text[:LONGEST_TEXT]) + "…" * (len(text) > LONGEST_TEXT)


def about(trace: RunTrace) -> str:
    """Policy, start, hardware and releases of a run, as far as its trace says them."""
    if (run := trace.run) is None:
        return ""
    versions = ", ".join(
        f"{name} {run.versions[name]}" for name in ("verl-tlt", "verl", "vllm") if name in run.versions
    )
    start = datetime.fromtimestamp(trace.runs[0].t, UTC).strftime("%Y-%m-%d %H:%M UTC")
    where = f"{run.gpus} workers on {run.hardware}" if run.hardware else ""
    return "; ".join(part for part in (run.policy, start, where, versions) if part)


def _tables(trace: RunTrace) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    headings, rows = table(rows_of_trace(trace))
    if trace.off:
        headings.append("no drafts, since")
        rows = [[*row, trace.off.get(step, "")] for row, step in zip(rows, trace.steps, strict=True)]
    yield "Steps", headings, rows
    drafters = ("candidate", "served", "initial")
    verdicts = [
        [str(p.step), f"v{p.version}", p.decision, "" if p.gain is None else f"{p.gain:+.1%}",
         *("" if (tau := p.tau.get(name)) is None else f"{tau:.2f}" for name in drafters), p.reason]
        for p in trace.publishes
    ]  # fmt: skip
    yield "Drafter versions", ["step", "version", "verdict", "gain", *drafters, "reason"], verdicts
    failed = [[str(s.step), trace.label(s.replica), s.error] for s in trace.sessions if s.error]
    failed += [[str(r.step), trace.label(r.replica), r.error or f"v{r.version} was loaded instead"]
               for r in trace.reloads if not r.ok]  # fmt: skip
    yield "Failures", ["step", "replica", "error"], failed
