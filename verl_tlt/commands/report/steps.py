"""A run by RL step: a row per step from its metrics, stock verl's too, and the parts of each step from its trace."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table
from rich.text import Text

from verl_tlt.commands.report.reader import RunTrace, TraceError
from verl_tlt.trace.events import Phase, Session
from verl_tlt.trace.metrics import counted_savings

Row = Mapping[str, float | None]
"""One RL step: a value for each of `COLUMNS`; None: not measured, or nothing of the kind in a stock run."""


class Column(NamedTuple):
    """A column of the table: its heading, the format of a value, and its metric; empty: computed by `step_row`."""

    heading: str
    form: str
    metric: str = ""


COLUMNS = {
    "reward": Column("reward", "{:.2f}", "critic/score/mean"),
    "step_s": Column("step s", "{:.1f}", "timing_s/step"),
    "rollout_s": Column("rollout s", "{:.1f}", "timing_s/gen"),
    "tokens": Column("tokens", "{:.0f}"),
    "accept_length": Column("accept length", "{:.2f}"),
    "bubble_s": Column("idle s", "{:.1f}", "tlt/idle_s"),
    "bubble_trained_s": Column("trained s", "{:.1f}", "tlt/trained_s"),
    "overhead_s": Column("own work s", "{:.2f}", "tlt/overhead_s"),
    "control_s": Column("choice of K s", "{:.2f}", "tlt/overhead_control_s"),
    "saved_s": Column("saved s", "{:.1f}"),
    "drafter_version_served": Column("served", "v{:.0f}", "tlt/drafter_version"),
    "probs_diff_max": Column("max prob diff", "{:.1e}", "training/rollout_probs_diff_max"),
}
IN_TERMINALS = (
    "reward", "step_s", "rollout_s", "accept_length", "bubble_s", "bubble_trained_s", "saved_s",
    "drafter_version_served",
)  # fmt: skip
"""Columns of the terminal's table, which fit in 80 characters."""


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


def given_up(trace: RunTrace) -> str:
    """A sentence about the replicas on which spot training was given up, as it stood in the end; empty: on none."""
    begun = trace.run.t if trace.run else 0.0  # a run that resumes gives every replica another try
    last = {stop.replica: stop for stop in trace.stops if stop.replica and stop.t >= begun}
    if not (off := sorted((stop for stop in last.values() if stop.cause), key=lambda stop: stop.t)):
        return ""
    where = f"{len(off)} of {len(trace.replicas)} replicas ({', '.join(trace.label(stop.replica) for stop in off)})"
    return f"Spot training was given up on {where}, last in step {off[-1].step}: {off[-1].cause}."


def paid(rows: Mapping[int, Row]) -> str:
    """Whether TLT paid by its own account, in one sentence; empty without a finished step."""
    if not rows:
        return ""
    known = [saved for row in rows.values() if (saved := row["saved_s"]) is not None]
    work, whole = sum(map(own_work_s, rows.values())), sum(row["step_s"] or 0.0 for row in rows.values())
    steps, ask = f"steps {min(rows)} to {max(rows)}", "not measured against stock: run verl-tlt compare"
    if not known:
        drafted = any((row["accept_length"] or 1.0) > 1.0 for row in rows.values())
        why = "what its rollouts would take without drafts is not known" if drafted else "nothing was drafted"
        return f"Unknown whether TLT paid in {steps}: {why}. Its own work took {work:.1f} s; {ask}."
    net = sum(known) - work
    share = f" ({abs(net) / whole:.1%} of {whole:.0f} s)" if whole else ""
    parts = f"{sum(known):.1f} s by drafts in {len(known)} of {len(rows)} rollouts, less {work:.1f} s of its own work"
    return f"TLT {'saved' if net >= 0 else 'lost'} an estimated {abs(net):.1f} s{share} in {steps}: {parts}; {ask}."


def cold_start(trace: RunTrace) -> str:
    """A sentence on what a cold start was expected to save and what was saved since; empty: there was none."""
    for step, metrics in trace.steps.items():
        if (expected_s := metrics.get("tlt/cold_start_expected_s")) is not None:
            until = step + round(metrics.get("tlt/cold_start_steps", 0.0))
            since = [counted_savings(m) or 0.0 for n, m in trace.steps.items() if step < n <= until]
            return (
                f"The cold start of step {step} took {metrics.get('tlt/overhead_cold_start_s', 0.0):.0f} s and was "
                f"expected to save {expected_s:.0f} s by step {until}; by TLT's own account {len(since)} steps saved "
                f"{sum(since):.0f} s."
            )
    return ""


def sentences(trace: RunTrace) -> Iterator[str]:
    """Sentences about a run, the answer first, to be read before its figures."""
    if answer := paid(rows_of_trace(trace)):
        yield answer
    if trace.off:
        last, why = list(trace.off.items())[-1]
        yield f"OFF in {len(trace.off)} of {len(trace.steps)} steps, last in step {last}: {why}."
    yield from filter(None, (given_up(trace), cold_start(trace)))
    for stop in (stop for stop in trace.stops if not stop.replica):
        yield f"After step {stop.step} speculation was {f'disabled: {stop.cause}' if stop.cause else 'enabled again'}."
    if failures := counted(metrics.get("tlt/errors", 0.0) for _, metrics in sorted(trace.steps.items())):
        yield f"{failures:.0f} failures of TLT did not end the run."
    if trace.skipped:
        yield f"{trace.skipped} lines of the trace could not be read."
    if trace.unread:
        yield f"The engines' {trace.unread / 1e9:.1f} GB of steps (tlt.trace.engine_steps) are too many and left out."


def counted(readings: Iterable[float]) -> float:
    """What a counter came to, over parts of a run: in a process that resumes it starts at 0."""
    total = before = 0.0
    for reading in readings:
        total += reading - before if reading >= before else reading
        before = reading
    return total


def own_work_s(row: Row) -> float:
    """TLT's own work that `saved_s` does not contain: known savings contain the waits for the choice of K."""
    return (row["overhead_s"] or 0.0) - (0.0 if row["saved_s"] is None else row["control_s"] or 0.0)


def initial_lengths(trace: RunTrace) -> dict[int, float]:
    """Accept length of the run's first drafter on held-out text, by step with a verdict."""
    return {p.step: tau for p in trace.publishes if (tau := p.tau.get("initial")) is not None}


def table(rows: Mapping[int, Row], columns: Iterable[str] = COLUMNS) -> tuple[list[str], list[list[str]]]:
    """Headings of those columns that a row fills, and the rows as text; "-" for what was not measured."""
    names = [name for name in columns if any(row[name] is not None for row in rows.values())]
    cells = [
        [str(step), *("-" if (value := row[name]) is None else COLUMNS[name].form.format(value) for name in names)]
        for step, row in rows.items()
    ]
    return ["step", *(COLUMNS[name].heading for name in names)], cells


def rich_table(rows: Mapping[int, Row], title: str) -> Table:
    headings, cells = table(rows, IN_TERMINALS)
    shown = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)  # a path is no markup
    for heading in headings:
        shown.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for row in cells:
        shown.add_row(*row)
    return shown


# ---------------------------------------------------------------------- the parts of a step


Ints = npt.NDArray[np.int64]
NO_STEP = -2
"""Stand-in for the draft length at a time when the engine ran no step; OFF is -1."""
GAP_S = 0.1
"""Seconds between two engine steps that are no pause."""


@dataclass(frozen=True)
class RLStep:
    """What a trace holds of one RL step; its rollout ran from `start` to `end` (unix seconds)."""

    step: int
    start: float
    end: float
    after: Sequence[Phase] = ()
    """The phases after the rollout, in the order of time."""
    sessions: Sequence[Session] = ()

    @property
    def finish(self) -> float:
        return max([self.end, *(p.end for p in self.after)])


def rl_steps(trace: RunTrace) -> dict[int, RLStep]:
    """Every step with a finished rollout, ascending, several of one step as one; a `TraceError` where there is none."""
    phases: defaultdict[int, list[Phase]] = defaultdict(list)
    sessions: defaultdict[int, list[Session]] = defaultdict(list)
    for phase in trace.phases:
        phases[phase.step].append(phase)
    for session in trace.sessions:
        sessions[session.step].append(session)
    steps = {}
    for step in sorted(phases):
        if rollouts := [p for p in phases[step] if p.name == "rollout"]:
            start, end = min(p.start for p in rollouts), max(p.end for p in rollouts)
            after = [p for p in phases[step] if p.name != "rollout" and p.end > end]
            steps[step] = RLStep(step, start, end, after, sessions[step])
    if not steps:
        raise TraceError(f"{trace.directory} holds no finished rollout to draw.")
    return steps


def most_trained(steps: Mapping[int, RLStep]) -> int:
    """The RL step with the longest sessions; without any, the one with the longest rollout."""
    trained = {n: sum(s.end - s.start for s in step.sessions) for n, step in steps.items()}
    return max(steps, key=lambda n: (trained[n], steps[n].end - steps[n].start))


def sampled(trace: RunTrace, step: RLStep, replica: str, at: npt.NDArray[np.float64]) -> tuple[Ints, Ints]:
    """A replica's batch and draft length (-1: OFF, `NO_STEP`: no engine step) at the unix seconds `at` of a step.

    Without a file of engine steps the batch is the requests in flight.
    """
    engine = trace.engine(replica)
    part = None if engine is None else engine.between(step.start, step.end)
    if part is None or not part.t.size:
        loads = [load for load in trace.loads if load.step == step.step]
        counts = np.array([0, *(load.inflight.get(replica, 0) for load in loads)], dtype=np.int64)
        batch = counts[np.searchsorted([load.t for load in loads], at, side="right")]
        k = np.full(len(at), NO_STEP)
    else:
        i = np.searchsorted(part.t, at).clip(max=part.t.size - 1)
        ran = (part.t[i] - part.latency_s[i] - GAP_S <= at) & (at <= part.t[i])
        batch, k = np.where(ran, part.batch[i], 0), np.where(ran, part.k[i], NO_STEP)
    return np.where(at <= step.end, batch, 0), k
