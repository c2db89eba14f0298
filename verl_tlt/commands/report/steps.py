"""A run by RL step: a row of numbers per step, and sentences about the whole run."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from verl_tlt.commands.report.reader import RunTrace
from verl_tlt.trace.events import RunStarted, Stopped
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
    "accept_length": Column("accept length (tokens)", "{:.2f}", "tlt/accept_length"),
    "idle_s": Column("idle (s)", "{:.1f}", "tlt/idle_s"),
    "idle_trained_s": Column("trained (s)", "{:.1f}", "tlt/trained_s"),
    "overhead_s": Column("TLT's own work (s)", "{:.2f}", "tlt/overhead_s"),
    "control_s": Column("choice of K (s)", "{:.2f}", "tlt/overhead_control_s"),
    "saved_s": Column("est. saved (s)", "{:.1f}"),
    "draft_length": Column("mean K", "{:.1f}", "tlt/draft_length_mean"),
    "drafter_version_served": Column("next drafter", "v{:.0f}", "tlt/drafter_version"),
    "probs_diff_max": Column("largest probability difference", "{:.1e}", "training/rollout_probs_diff_max"),
}
IN_TERMINALS = (
    "reward", "step_s", "rollout_s", "accept_length", "idle_s", "idle_trained_s", "saved_s", "drafter_version_served",
)  # fmt: skip
"""Columns of the terminal's table, which fit in 80 characters."""
IN_PAGES = (*IN_TERMINALS[:-1], "overhead_s", "drafter_version_served", "probs_diff_max")
COLD_START = "tlt/overhead_cold_start_s"
ERRORS = "tlt/errors"


def rows_of_trace(trace: RunTrace) -> pd.DataFrame:
    """A row for each RL step, with `COLUMNS`; NaN: not measured."""
    rows = {step: step_row(metrics) for step, metrics in trace.steps.items()}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS), dtype=float)


def step_row(metrics: Mapping[str, float]) -> Row:
    """The row of one step."""
    needed = ("response_length/mean", "prompt_length/mean", "perf/total_num_tokens")
    response, prompt, total = (metrics.get(name, 0.0) for name in needed)
    responses = round(total / (response + prompt)) if response + prompt > 0 else 0
    return {
        **{name: metrics.get(column.metric) for name, column in COLUMNS.items()},
        "tokens": round(response * responses) if metrics.keys() >= {*needed} else None,
        "saved_s": counted_savings(metrics),
    }


def own_work_s(rows: pd.DataFrame) -> pd.Series:
    """TLT's own work that `saved_s` does not contain: known savings contain the waits for the choice of K."""
    return rows.overhead_s.fillna(0.0) - rows.control_s.where(rows.saved_s.notna()).fillna(0.0)


def did_it_pay(trace: RunTrace) -> str:
    """The answer in one sentence, by TLT's estimate."""
    rows = rows_of_trace(trace)
    if rows.empty:
        return "No step is finished yet."
    known = rows.saved_s.dropna()
    work = own_work_s(rows).sum()
    steps = f"steps {rows.index[0]} to {rows.index[-1]}"
    if known.empty:
        if (rows.draft_length > 0.0).any():
            return f"What TLT saved in {steps} is not known; its own work took {work:.1f} s."
        return f"TLT saved nothing in {steps}: nothing was drafted. Its own work took {work:.1f} s."
    drafts = known.sum()
    net = drafts - work
    without_tlt = rows.step_s.sum() + net
    comparable = without_tlt > 0 and not trace.standalone  # standalone engines decode beside the steps, which gain less
    if net >= 0:
        whole = f"TLT saved an estimated {net:.1f} s in {steps}"
        if comparable:
            whole += f", {net / without_tlt:.1%} of the {without_tlt:.0f} s that they would have taken without it"
    else:
        whole = f"TLT made {steps} an estimated {-net:.1f} s longer"
        if comparable:
            whole += f" ({-net / without_tlt:.1%})"
    by_drafts = f"drafts {'saved' if drafts >= 0 else 'lost'} {abs(drafts):.1f} s"
    return f"{whole}: {by_drafts} in {len(known)} of {len(rows)} rollouts, and TLT's own work took {work:.1f} s."


def sentences(trace: RunTrace) -> Iterator[str]:
    """What else a reader must know about a run, before its figures."""
    rows = rows_of_trace(trace)
    yield "This is TLT's estimate; verl-tlt compare measures it against stock verl."
    if trace.standalone:
        yield "Engines decode while the trainer works: where the trainer is slower, a step gains less than they do."
        yield "The rollout's time is the trainer's wait for samples."
    if not trace.standalone and (pace := speed(rows)):
        yield pace
    if published := learned(trace):
        yield published
    if trace.off:
        last, why = list(trace.off.items())[-1]
        yield f"Nothing was drafted in {len(trace.off)} of {len(trace.steps)} steps, last in step {last}: {why}."
    for step, metrics in trace.steps.items():
        if seconds := metrics.get(COLD_START):
            yield f"In step {step} the run waited {seconds:.0f} s for its first drafter (cold start)."
    yield from switches(trace)
    if difference := probability_difference(rows):
        yield difference
    readings = {step: metrics.get(ERRORS, 0.0) for step, metrics in trace.steps.items()}
    if failures := counted(readings, {run.step0 for run in trace.runs}):
        yield told_failures(round(failures))
    if trace.skipped:
        yield f"{trace.skipped} {'line' if trace.skipped == 1 else 'lines'} of the trace could not be read."


def switches(trace: RunTrace) -> Iterator[str]:
    """A sentence for each time that drafting was switched off or on, or began again because the run was resumed."""
    events: list[Stopped | RunStarted] = [*trace.stops, *trace.runs]
    off = False
    for event in sorted(events, key=lambda event: event.t):
        if isinstance(event, Stopped):
            change = f"switched off: {event.cause}" if event.cause else "switched on again"
            yield f"Drafting was {change} (step {event.step})."
        elif off and event.step0 not in trace.off:
            yield f"Drafting began again when the run was resumed at step {event.step0}."
        off = isinstance(event, Stopped) and bool(event.cause)


def told_failures(count: int) -> str:
    if count == 1:
        return "TLT counted 1 failure or warning (tlt/errors); it did not end the run."
    return f"TLT counted {count} failures and warnings (tlt/errors); none ended the run."


def speed(rows: pd.DataFrame) -> str:
    """A sentence on the tokens per second of those rollouts whose savings are known; empty if there are none."""
    known = rows[rows.saved_s.notna()]
    tokens, spent, saved = known[["tokens", "rollout_s", "saved_s"]].sum()
    if not tokens or not spent or spent + saved <= 0:
        return ""
    undrafted = tokens / (spent + saved)
    return f"Rollouts made {tokens / spent:.0f} tokens/s, and an estimated {undrafted:.0f} tokens/s without drafts."


def learned(trace: RunTrace) -> str:
    """A sentence on the accept length before and after new drafters were published; empty if none was."""
    lengths = rows_of_trace(trace).accept_length.dropna()
    published = [p for p in trace.publishes if p.decision == "published"]
    if not published:
        return ""
    times = "once" if len(published) == 1 else f"{len(published)} times"
    sentence = f"A newly trained drafter was published {times}"
    if len(lengths):
        first_and_last = lengths.iloc[[0, -1]] if len(lengths) > 1 else lengths
        ends = ", ".join(f"{length:.2f} in step {step}" for step, length in first_and_last.items())
        sentence += f": accept length {ends}"
    held_out = [p.tau for p in published if {"initial", "candidate"} <= p.tau.keys()]
    if held_out:
        first = held_out[-1]["initial"]
        last = held_out[-1]["candidate"]
        sentence += "; on the same held-out text, with the longest drafts, the run's first drafter has "
        sentence += f"{first:.2f} and the last one {last:.2f}"
    return f"{sentence}."


def new_drafters(rows: pd.DataFrame) -> list[int]:
    """Steps whose rollout is the first with a newly published drafter, which the step before has loaded."""
    versions = rows.drafter_version_served.ffill().fillna(0.0)
    return rows.index[versions.diff().shift() > 0].tolist()


def probability_difference(rows: pd.DataFrame) -> str:
    """Compare token probabilities of rollout and actor, in steps with drafts and in steps without."""
    drafted = rows.draft_length > 0
    with_drafts = rows.probs_diff_max[drafted].max()
    without = rows.probs_diff_max[~drafted].max()
    if pd.isna(with_drafts):
        return ""
    stock = "" if pd.isna(without) else f"; {without:.1e} in steps without drafts, as in stock verl"
    return (
        "Largest difference between a token's probability in the rollout and in the actor: "
        f"{with_drafts:.1e} in steps with drafts{stock}."
    )


def counted(readings: Mapping[int, float], begun: Collection[int]) -> float:
    """The total of a counter that was read after each step.

    In the steps `begun`, the first ones of a process that resumes, it starts at 0 again.
    """
    total = 0.0
    before = 0.0
    for step, reading in readings.items():
        total += reading if step in begun or reading < before else reading - before
        before = reading
    return total


def table(rows: pd.DataFrame, columns: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """Headings of those columns that a row fills, and the rows as text; "-" for what was not measured."""
    shown = rows[list(columns)].dropna(axis="columns", how="all")
    texts = shown.apply(lambda column: column.map(COLUMNS[column.name].form.format, na_action="ignore")).fillna("-")
    cells = [[str(step), *row] for step, *row in texts.itertuples()]
    return ["step", *(COLUMNS[name].heading for name in shown)], cells


def rich_table(rows: pd.DataFrame, title: str) -> Table:
    headings, cells = table(rows, IN_TERMINALS)
    shown = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)  # a path is no markup
    for heading in headings:
        shown.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in cells:
        shown.add_row(*row)
    return shown
