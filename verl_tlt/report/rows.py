"""A run as a table with one row per RL step, from its metrics; they have the same names in a run of stock verl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from verl_tlt.report.reader import RunTrace
from verl_tlt.trace.metrics import counted_savings

TRAIN_PHASES = ("reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""verl's timers between the rollout and the weight sync."""


@dataclass(frozen=True)
class StepRow:
    """One RL step. Times are in seconds; None: not measured, or nothing of the kind in a stock run."""

    step: int
    reward: float | None
    step_s: float | None
    rollout_s: float | None
    """verl's `timing_s/gen`: sampling, stopping the sessions and putting the replicas to sleep."""
    train_s: float | None
    tokens: int | None
    """Tokens of all responses."""
    accept_length: float | None
    bubble_s: float | None
    bubble_trained_s: float | None
    overhead_s: float | None
    control_s: float | None
    """The part of `overhead_s` in which engine steps waited for the choice of K."""
    saved_s: float | None
    """`counted_savings`: None too where nothing was drafted."""
    stop_latency_s: float | None
    drafter_version_published: int | None
    drafter_version_served: int | None
    probs_diff_max: float | None

    @property
    def work_s(self) -> float:
        """TLT's own work that `saved_s` does not contain: known savings contain the waits for the choice of K."""
        return (self.overhead_s or 0.0) - (0.0 if self.saved_s is None else self.control_s or 0.0)


COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("step", "{:d}"),
    "reward": ("reward", "{:.2f}"),
    "step_s": ("step s", "{:.1f}"),
    "rollout_s": ("rollout s", "{:.1f}"),
    "train_s": ("train s", "{:.1f}"),
    "tokens": ("tokens", "{:d}"),
    "accept_length": ("accept length", "{:.2f}"),
    "bubble_s": ("bubble s", "{:.1f}"),
    "bubble_trained_s": ("trained s", "{:.1f}"),
    "overhead_s": ("own work s", "{:.2f}"),
    "saved_s": ("saved s", "{:.1f}"),
    "stop_latency_s": ("stop s", "{:.3f}"),
    "drafter_version_published": ("published", "v{:d}"),
    "drafter_version_served": ("served", "v{:d}"),
    "probs_diff_max": ("max prob diff", "{:.1e}"),
}
"""Field of `StepRow` -> heading and format, in tables."""
IN_TERMINALS = (
    "step", "reward", "step_s", "rollout_s", "accept_length", "bubble_s", "bubble_trained_s", "saved_s",
    "drafter_version_served",
)  # fmt: skip
"""Columns of the terminal's table, which fit in 80 characters."""


def rows_of_trace(trace: RunTrace) -> list[StepRow]:
    """One row per finished step."""
    return [step_row(step, metrics) for step, metrics in trace.steps.items()]


def step_row(step: int, metrics: Mapping[str, float]) -> StepRow:
    """The row of one step. A run without TLT has an accept length of 1: one token per pass of the target."""
    train = [metrics[key] for name in TRAIN_PHASES if (key := f"timing_s/{name}") in metrics]
    tlt = any(name.startswith("tlt/") for name in metrics)
    published, served = metrics.get("tlt/drafter_version_published"), metrics.get("tlt/drafter_version")
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
        control_s=metrics.get("tlt/overhead_control_s"),
        saved_s=counted_savings(metrics),
        stop_latency_s=metrics.get("tlt/stop_latency_s"),
        drafter_version_published=None if published is None else int(published),
        drafter_version_served=None if served is None else int(served),
        probs_diff_max=metrics.get("training/rollout_probs_diff_max"),
    )


def initial_lengths(trace: RunTrace) -> dict[int, float]:
    """By step, the accept length of the run's first drafter on held-out text; only steps with a verdict."""
    judged = {p.step: p.tau.get("initial") for p in trace.publishes}
    return {step: tau for step, tau in judged.items() if tau is not None}


def table(rows: Sequence[StepRow], columns: Iterable[str] = COLUMNS) -> tuple[list[str], list[list[str]]]:
    """Names of those columns that a row fills, and the rows as text; "-" for what was not measured."""
    names = [name for name in columns if any(getattr(row, name) is not None for row in rows)]
    found = [[(getattr(row, name), COLUMNS[name][1]) for name in names] for row in rows]
    return names, [["-" if value is None else form.format(value) for value, form in row] for row in found]


def rich_table(rows: Sequence[StepRow], title: str) -> Table:
    """The rows for a terminal."""
    names, cells = table(rows, IN_TERMINALS)
    shown = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)  # a path is no markup
    for name in names:
        shown.add_column(COLUMNS[name][0], justify="right", min_width=max(map(len, COLUMNS[name][0].split())))
    for row in cells:
        shown.add_row(*row)
    return shown


def _response_tokens(metrics: Mapping[str, float]) -> int | None:
    """From what verl logs: mean lengths of responses and prompts, and the total of all tokens."""
    names = ("response_length/mean", "prompt_length/mean", "perf/total_num_tokens")
    if any(name not in metrics for name in names):
        return None
    response, prompt, total = (metrics[name] for name in names)
    responses = round(total / (response + prompt)) if response + prompt > 0 else 0
    return round(response * responses)
