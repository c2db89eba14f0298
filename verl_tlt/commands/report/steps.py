"""A run by RL step: a row of numbers per step, and sentences about the whole run."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from verl_tlt.commands.report.reader import RunTrace
from verl_tlt.trace.metrics import counted_savings

Row = Mapping[str, float | None]
"""One RL step: a value for each of `COLUMNS`; None: not measured, or nothing of the kind in a stock run."""


class Column(NamedTuple):
    """A column of the table: its heading with the unit, the format of a value, and its metric."""

    heading: str
    form: str
    metric: str = ""
    """Empty: computed by `step_row`."""


COLUMNS = {
    "reward": Column("reward", "{:.2f}", "critic/score/mean"),
    "step_s": Column("step time (s)", "{:.1f}", "timing_s/step"),
    "rollout_s": Column("rollout (s)", "{:.1f}", "timing_s/gen"),
    "tokens": Column("response tokens", "{:,.0f}"),
    "accept_length": Column("accept length (tokens)", "{:.2f}"),
    "idle_s": Column("idle (s)", "{:.1f}", "tlt/idle_s"),
    "idle_trained_s": Column("trained (s)", "{:.1f}", "tlt/trained_s"),
    "overhead_s": Column("TLT's own work (s)", "{:.2f}", "tlt/overhead_s"),
    "control_s": Column("choice of K (s)", "{:.2f}", "tlt/overhead_control_s"),
    "saved_s": Column("est. saved (s)", "{:.1f}"),
    "drafter_version_served": Column("next drafter", "v{:.0f}", "tlt/drafter_version"),
    "probs_diff_max": Column("largest probability difference", "{:.1e}", "training/rollout_probs_diff_max"),
}
IN_TERMINALS = (
    "reward", "step_s", "rollout_s", "accept_length", "idle_s", "idle_trained_s", "saved_s", "drafter_version_served",
)  # fmt: skip
"""Columns of the terminal's table, which fit in 80 characters."""
IN_PAGES = (*IN_TERMINALS[:-1], "overhead_s", "drafter_version_served", "probs_diff_max")
DRAFTED = "tlt/draft_length_mean"
"""Mean draft length; 0: nothing was drafted in the step."""
COLD_START = "tlt/overhead_cold_start_s"
ERRORS = "tlt/errors"


def rows_of_trace(trace: RunTrace) -> dict[int, Row]:
    return {step: step_row(metrics) for step, metrics in trace.steps.items()}


def step_row(metrics: Mapping[str, float]) -> Row:
    """The row of one step. A run without TLT has an accept length of 1: one token per pass of the target."""
    tlt = any(name.startswith("tlt/") for name in metrics)
    needed = ("response_length/mean", "prompt_length/mean", "perf/total_num_tokens")
    response, prompt, total = (metrics.get(name, 0.0) for name in needed)
    responses = round(total / (response + prompt)) if response + prompt > 0 else 0
    return {
        **{name: metrics.get(column.metric) for name, column in COLUMNS.items()},
        "tokens": round(response * responses) if metrics.keys() >= {*needed} else None,
        "accept_length": metrics.get("tlt/accept_length", None if tlt else 1.0),
        "saved_s": counted_savings(metrics),
    }


def own_work_s(row: Row) -> float:
    """TLT's own work that `saved_s` does not contain: known savings contain the waits for the choice of K."""
    return (row["overhead_s"] or 0.0) - (0.0 if row["saved_s"] is None else row["control_s"] or 0.0)


def did_it_pay(rows: Mapping[int, Row]) -> str:
    """The answer in one sentence, by TLT's estimate."""
    if not rows:
        return "No step is finished yet."
    known = [saved for row in rows.values() if (saved := row["saved_s"]) is not None]
    work, whole = sum(map(own_work_s, rows.values())), sum(row["step_s"] or 0.0 for row in rows.values())
    steps = f"steps {min(rows)} to {max(rows)}"
    if not known:
        if any((row["accept_length"] or 1.0) > 1.0 for row in rows.values()):
            return f"What TLT saved in {steps} is not known; its own work took {work:.1f} s."
        return f"TLT saved nothing in {steps}: nothing was drafted. Its own work took {work:.1f} s."
    net, share = sum(known) - work, ""
    if whole:
        share = f" of {whole:.0f} s ({abs(net) / whole:.1%})"
    drafts = f"drafts {'saved' if sum(known) >= 0 else 'lost'} {abs(sum(known)):.1f} s"
    return (
        f"TLT {'saved' if net >= 0 else 'lost'} an estimated {abs(net):.1f} s{share} in {steps}: {drafts} in "
        f"{len(known)} of {len(rows)} rollouts, and TLT's own work took {work:.1f} s."
    )


def sentences(trace: RunTrace) -> Iterator[str]:
    """What else a reader must know about a run, before its figures."""
    yield "This is TLT's estimate; verl-tlt compare measures it against stock verl."
    yield from filter(None, (speed(rows_of_trace(trace)), learned(trace)))
    if trace.off:
        last, why = list(trace.off.items())[-1]
        yield f"Nothing was drafted in {len(trace.off)} of {len(trace.steps)} steps, last in step {last}: {why}."
    for step, metrics in trace.steps.items():
        if seconds := metrics.get(COLD_START):
            yield f"In step {step} the run waited {seconds:.0f} s for its first drafter (cold start)."
    for stop in trace.stops:
        yield f"Drafting was {f'switched off: {stop.cause}' if stop.cause else 'switched on again'} (step {stop.step})."
    if difference := probability_difference(trace):
        yield difference
    if failures := counted(metrics.get(ERRORS, 0.0) for metrics in trace.steps.values()):
        yield f"{failures:.0f} failures of TLT did not end the run."
    if trace.skipped:
        yield f"{trace.skipped} lines of the trace could not be read."


def speed(rows: Mapping[int, Row]) -> str:
    """A sentence on the tokens per second of those rollouts whose savings are known; empty if there are none."""
    known = [row for row in rows.values() if row["saved_s"] is not None]
    tokens, spent, saved = (sum(row[name] or 0.0 for row in known) for name in ("tokens", "rollout_s", "saved_s"))
    if not tokens or not spent or spent + saved <= 0:
        return ""
    undrafted = tokens / (spent + saved)
    return f"Rollouts made {tokens / spent:.0f} tokens/s, and an estimated {undrafted:.0f} tokens/s without drafts."


def learned(trace: RunTrace) -> str:
    """A sentence on the accept length before and after idle time trained the drafter; empty if it published none."""
    rows = rows_of_trace(trace)
    lengths = {step: length for step, row in rows.items() if (length := row["accept_length"]) is not None}
    published = sum(p.decision == "published" for p in trace.publishes)
    if not published or not lengths:
        return ""
    first, last = min(lengths), max(lengths)
    times = "once" if published == 1 else f"{published} times"
    return (
        f"A drafter trained in idle time was published {times}: accept length {lengths[first]:.2f} in step {first}, "
        f"{lengths[last]:.2f} in step {last}."
    )


def new_drafters(rows: Mapping[int, Row]) -> list[int]:
    """Steps whose rollout is the first with a newly published drafter, which the step before has loaded."""
    versions = [row["drafter_version_served"] or 0.0 for row in rows.values()]
    later = zip(list(rows)[2:], itertools.pairwise(versions), strict=False)
    return [step for step, (before, loaded) in later if loaded > before]


def probability_difference(trace: RunTrace) -> str:
    """A sentence on how far rollout and actor differ, beside steps in which engines ran as in stock verl."""
    drafted: dict[bool, list[float]] = {True: [], False: []}
    for metrics in trace.steps.values():
        if (difference := metrics.get(COLUMNS["probs_diff_max"].metric)) is not None:
            drafted[metrics.get(DRAFTED, 0.0) > 0].append(difference)
    if not drafted[True]:
        return ""
    stock = f"; {max(drafted[False]):.1e} in steps without drafts, as in stock verl" if drafted[False] else ""
    return (
        "Largest difference between a token's probability in the rollout and in the actor: "
        f"{max(drafted[True]):.1e} in steps with drafts{stock}."
    )


def counted(readings: Iterable[float]) -> float:
    """What a counter came to, over parts of a run: in a process that resumes it starts at 0."""
    total = before = 0.0
    for reading in readings:
        total += reading - before if reading >= before else reading
        before = reading
    return total


def initial_lengths(trace: RunTrace) -> dict[int, float]:
    """Accept length of the run's first drafter on held-out text, by step with a verdict."""
    return {p.step: tau for p in trace.publishes if (tau := p.tau.get("initial")) is not None}


def table(rows: Mapping[int, Row], columns: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """Headings of those columns that a row fills, and the rows as text; "-" for what was not measured."""
    names = [name for name in columns if any(row[name] is not None for row in rows.values())]
    cells = [
        [str(step), *("-" if (value := row[name]) is None else COLUMNS[name].form.format(value) for name in names)]
        for step, row in rows.items()
    ]
    return ["step", *(COLUMNS[name].heading for name in names)], cells


def rich_table(rows: Mapping[int, Row], title: str) -> Table:
    headings, cells = table(rows, IN_TERMINALS)
    shown = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)  # a path is no markup
    for heading in headings:
        shown.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in cells:
        shown.add_row(*row)
    return shown
