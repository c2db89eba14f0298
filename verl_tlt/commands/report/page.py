"""The page of one run: did it pay, the picture, the numbers."""

from collections.abc import Iterator
from datetime import UTC, datetime

from verl_tlt.commands.report.html import Page, PageTable
from verl_tlt.commands.report.reader import RunTrace
from verl_tlt.commands.report.steps import IN_PAGES, did_it_pay, own_work_s, rows_of_trace, sentences, table
from verl_tlt.commands.report.timeline import most_trained, rl_steps
from verl_tlt.trace.events import Publish

SCORED = ("candidate", "served", "initial")
"""Drafters of which a publish event has the accept length."""


def run_page(trace: RunTrace) -> Page:
    """The page of a traced run; a `TraceError` says that it has no finished rollout."""
    from verl_tlt.commands.report.figures import run_charts, step_chart

    steps = rl_steps(trace)
    covered = {n: step for n, step in steps.items() if step.start >= trace.engines_since} or steps  # the last hours
    return Page(
        heading=trace.run.name if trace.run and trace.run.name else "A run with verl-tlt",
        about=about(trace),
        answer=did_it_pay(trace),
        sentences=list(sentences(trace)),
        facts=dict(_facts(trace)),
        charts=[step_chart(trace, steps[most_trained(covered)]), *run_charts(trace)],
        tables=list(_tables(trace)),
    )


def _facts(trace: RunTrace) -> Iterator[tuple[str, str]]:
    rows = rows_of_trace(trace)
    share = "rollout's share of a step"
    devices = "replicas"
    if trace.standalone:
        share = "the trainer's wait for samples, share of a step"
        devices = "the trainer's devices"
    if whole := rows.step_s.sum():
        yield "mean step", f"{rows.step_s.mean():.1f} s"
        yield share, f"{rows.rollout_s.sum() / whole:.0%}"
        yield "TLT's own work", f"{own_work_s(rows).sum() / whole:.1%} of the time"
    if (lengths := rows.accept_length.dropna()).size:
        yield f"accept length, step {lengths.index[-1]}", f"{lengths.iloc[-1]:.2f} tokens per draft"
    if idle := rows.idle_s.sum():
        yield f"idle time of {devices}", f"{idle:.1f} s, {rows.idle_trained_s.sum() / idle:.0%} trained the drafter"
    if (versions := rows.drafter_version_served.dropna()).size:
        yield "drafter served", f"version {versions.iloc[-1]:.0f}"


def _tables(trace: RunTrace) -> Iterator[PageTable]:
    headings, rows = table(rows_of_trace(trace), IN_PAGES)
    if trace.off:
        headings.append("why nothing was drafted")
        rows = [[*row, trace.off.get(step, "")] for row, step in zip(rows, trace.steps, strict=True)]
    yield PageTable("Steps", headings, rows)
    named = [f"{name}: accept length (tokens)" for name in SCORED]
    verdicts = [_verdict_row(publish) for publish in trace.publishes]
    yield PageTable("Drafter versions", ["RL step", "version", "decision", "gain", *named, "reason"], verdicts)
    failed = [[str(s.step), trace.label(s.replica), s.error] for s in trace.sessions if s.error]
    failed += [[str(r.step), trace.label(r.replica), r.error or f"v{r.version} was loaded instead"]
               for r in trace.reloads if not r.ok]  # fmt: skip
    yield PageTable("Failures", ["RL step", "replica", "error"], failed)


def _verdict_row(publish: Publish) -> list[str]:
    """The table's row of one verdict on a newly trained drafter."""
    gain = "" if publish.gain is None else f"{publish.gain:+.1%}"
    lengths = [f"{publish.tau[name]:.2f}" if name in publish.tau else "" for name in SCORED]
    return [str(publish.step), f"v{publish.version}", publish.decision, gain, *lengths, publish.reason]


def about(trace: RunTrace) -> str:
    """Policy, start, hardware and releases of a run, as far as its trace says them."""
    run = trace.run
    if run is None:
        return ""
    packages = [name for name in ("verl-tlt", "verl", "vllm") if name in run.versions]
    versions = ", ".join(f"{name} {run.versions[name]}" for name in packages)
    first_step = min(trace.steps, default=run.step0)
    not_resumed = [started for started in trace.runs if started.step0 <= first_step]
    began_at = (not_resumed or trace.runs)[-1].t  # the last one: those before it were begun anew
    start = datetime.fromtimestamp(began_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    where = f"{run.gpus} workers on {run.hardware}" if run.hardware else ""
    return "; ".join(part for part in (run.policy, start, where, versions) if part)
