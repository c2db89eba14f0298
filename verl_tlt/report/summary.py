"""A run as a table: one row per RL step, from the trace or, for stock runs, from verl's own `file` logger.

Both sources use verl's metric names, so the same row means the same thing with the flag on and off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from verl_tlt.report.reader import RunTrace, TraceError

TRAIN_PHASES = ("reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""verl's timers between rollout and weight sync."""


@dataclass(frozen=True)
class StepRow:
    """One RL step. Seconds are wall clock; None: not measured, or does not exist in a stock run."""

    step: int
    reward: float | None
    step_s: float | None
    rollout_s: float | None
    """verl's `timing_s/gen`: sampling, and what ends it (stopping spot workers, putting replicas to sleep)."""
    train_s: float | None
    tokens: int | None
    """Tokens of all responses."""
    accept_length: float | None
    bubble_s: float | None
    bubble_trained_s: float | None
    overhead_s: float | None
    saved_s: float | None
    """By which drafting ended the rollout before stock decoding would have, by estimate; negative: after."""
    stop_latency_s: float | None
    drafter_version_published: int | None
    drafter_version_served: int | None
    probs_diff_max: float | None


@dataclass(frozen=True)
class Ratio:
    """How many times faster a run is than stock, per token; above 1 is faster."""

    mean: float
    """Stock seconds per token over this run's, each summed over all compared steps."""
    low: float
    high: float
    """Least and greatest of the same ratio step by step (same prompts, other samples)."""

    def __str__(self) -> str:
        """As people read it."""
        return f"{self.mean:.2f}x (single steps {self.low:.2f} to {self.high:.2f})"


def initial_lengths(trace: RunTrace) -> dict[int, float]:
    """By step, the accept length of the run's first drafter, never trained, simulated on the gate's held-out text.

    Steps without a verdict are missing.
    """
    judged = {p.step: p.tau.get("initial") for p in trace.publishes}
    return {step: tau for step, tau in judged.items() if tau is not None}


def step_row(step: int, metrics: Mapping[str, float]) -> StepRow:
    """The row of one step's metrics; a run without TLT yields one token per pass of the target."""
    train = [metrics[key] for name in TRAIN_PHASES if (key := f"timing_s/{name}") in metrics]
    tlt = any(name.startswith("tlt/") for name in metrics)
    return StepRow(
        step=step,
        reward=metrics.get("critic/score/mean"),
        step_s=metrics.get("timing_s/step"),
        rollout_s=metrics.get("timing_s/gen"),
        train_s=sum(train) if train else None,
        tokens=_response_tokens(metrics),
        accept_length=metrics.get("tlt/accept_length", None if tlt else 1.0),
        bubble_s=metrics.get("tlt/bubble_s"),
        bubble_trained_s=metrics.get("tlt/bubble_trained_s"),
        overhead_s=metrics.get("tlt/overhead_s"),
        saved_s=metrics.get("tlt/saved_s"),
        stop_latency_s=metrics.get("tlt/stop_latency_s"),
        drafter_version_published=_int(metrics.get("tlt/drafter_version_published")),
        drafter_version_served=_int(metrics.get("tlt/drafter_version")),
        probs_diff_max=metrics.get("training/rollout_probs_diff_max"),
    )


def rows_of_trace(trace: RunTrace) -> list[StepRow]:
    """One row per finished step of a traced run."""
    return [step_row(step, metrics) for step, metrics in trace.steps.items()]


def rows_of_metrics_file(path: str | Path) -> list[StepRow]:
    """One row per training step in verl's `file` logger output ({"step": ..., "data": {...}} a line).

    Raises:
        TraceError: the file is missing or holds no training step.
    """
    rows: dict[int, StepRow] = {}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise TraceError(f"verl's metrics file {path} cannot be read: {error.strerror}.") from error
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # still being written
        if "timing_s/step" in record.get("data", {}):
            rows[record["step"]] = step_row(record["step"], record["data"])
    if not rows:
        raise TraceError(f"verl's metrics file {path} holds no finished training step.")
    return [rows[step] for step in sorted(rows)]


def ratio(stock: Sequence[StepRow], tlt: Sequence[StepRow], column: str) -> Ratio | None:
    """How much faster `tlt` is than `stock` in "rollout_s" or "step_s", per token, the first step discarded.

    Two runs of one seed sample different responses, hence per token; what remains is the luck of the longest response.
    None without two steps to compare.
    """
    ours = {row.step: row for row in tlt[1:]}
    pairs = [(row, ours[row.step]) for row in stock[1:] if row.step in ours]
    timed = []
    for a, b in pairs:
        seconds = getattr(a, column), getattr(b, column)
        if a.tokens and b.tokens and all(seconds):
            timed.append((seconds[0], a.tokens, seconds[1], b.tokens))
    if not timed:
        return None
    single = [(s / n) / (t / m) for s, n, t, m in timed]
    stock_s, stock_n, tlt_s, tlt_n = (sum(column) for column in zip(*timed, strict=True))
    return Ratio(mean=(stock_s / stock_n) / (tlt_s / tlt_n), low=min(single), high=max(single))


def summary(
    seconds: float,
    steps: Sequence[StepRow],
    stock: Sequence[StepRow] | None = None,
    warm: Sequence[StepRow] | None = None,
) -> dict[str, Any]:
    """What `summary.json` holds; with `stock` also the ratios, null where there is nothing to compare."""
    result: dict[str, Any] = {"seconds": seconds, "steps": [asdict(row) for row in steps]}
    if stock is not None:
        result["stock"] = [asdict(row) for row in stock]
        rollout, e2e = ratio(stock, steps, "rollout_s"), ratio(stock, steps, "step_s")
        result["rollout_ratio"] = rollout.mean if rollout else None
        result["e2e_ratio"] = e2e.mean if e2e else None
        warmed = ratio(stock, warm, "rollout_s") if warm is not None else None
        result["warm_rollout_ratio"] = warmed.mean if warmed else None
    return result


COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("step", "{:d}"),
    "reward": ("reward", "{:.2f}"),
    "step_s": ("step s", "{:.1f}"),
    "rollout_s": ("rollout s", "{:.1f}"),
    "train_s": ("train s", "{:.1f}"),
    "tokens": ("tokens", "{:d}"),
    "accept_length": ("accept length", "{:.2f}"),
    "bubble_s": ("bubble s", "{:.1f}"),
    "bubble_trained_s": ("trained in it s", "{:.1f}"),
    "overhead_s": ("tlt s", "{:.2f}"),
    "saved_s": ("saved s", "{:.1f}"),
    "stop_latency_s": ("stop s", "{:.3f}"),
    "drafter_version_published": ("published", "v{:d}"),
    "drafter_version_served": ("served", "v{:d}"),
    "probs_diff_max": ("max prob diff", "{:.1e}"),
}
"""Field of `StepRow` -> heading and format, for tables."""


DROPPED_FIRST = (
    "probs_diff_max", "stop_latency_s", "drafter_version_published", "tokens", "train_s", "overhead_s", "step_s"
)  # fmt: skip
"""Columns that a narrow terminal does without, the least missed first."""


def cells(row: StepRow) -> list[str]:
    """The row as text, in the order of `COLUMNS`; "-" for what was not measured."""
    values = ((getattr(row, name), form) for name, (_, form) in COLUMNS.items())
    return ["-" if value is None else form.format(value) for value, form in values]


def rich_table(rows: Sequence[StepRow], title: str, width: int) -> Table:
    """The rows for a terminal of `width` columns; what no row filled and what does not fit is left out."""
    text = [cells(row) for row in rows]
    headings = [heading for heading, _ in COLUMNS.values()]
    filled = [i for i in range(len(COLUMNS)) if any(line[i] != "-" for line in text)]
    needed = {i: max(len(word) for line in text for word in [line[i], *headings[i].split()]) for i in filled}
    for name in DROPPED_FIRST:
        if sum(needed.values()) + 3 * len(needed) + 1 > width:  # a border and two blanks each
            needed.pop(list(COLUMNS).index(name), None)
    table = Table(title=Text(title), title_justify="left")  # a path is no markup
    for i, least in needed.items():
        table.add_column(headings[i], justify="right", min_width=least)
    for line in text:
        table.add_row(*(line[i] for i in needed))
    return table


def _response_tokens(metrics: Mapping[str, float]) -> int | None:
    """Mean lengths and the total with prompts are what verl logs; the number of responses follows from both."""
    names = ("response_length/mean", "prompt_length/mean", "perf/total_num_tokens")
    if any(name not in metrics for name in names):
        return None
    response, prompt, total = (metrics[name] for name in names)
    responses = round(total / (response + prompt)) if response + prompt > 0 else 0
    return round(response * responses)


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)
