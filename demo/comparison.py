"""Compares the demo's runs: verl-tlt, stock verl, and a run that starts with the trained drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_tlt.report.reader import TraceError
from verl_tlt.report.rows import StepRow, step_row


@dataclass(frozen=True)
class Ratio:
    """How many times faster a run is than stock, per token; above 1 is faster."""

    mean: float
    """Seconds per token of stock over those of the run, each over all compared steps."""
    low: float
    high: float
    """The least and the greatest ratio of a single step."""

    def __str__(self) -> str:
        """As the demo prints it."""
        return f"{self.mean:.2f}x (single steps {self.low:.2f} to {self.high:.2f})"


def ratio(stock: Sequence[StepRow], tlt: Sequence[StepRow], column: str) -> Ratio | None:
    """How much faster `tlt` is than `stock` in "rollout_s" or "step_s", without the first step.

    Two runs of one seed sample different responses, hence per token. None without two steps to compare.
    """
    ours = {row.step: row for row in tlt[1:]}
    timed = []
    for a, b in ((row, ours[row.step]) for row in stock[1:] if row.step in ours):
        seconds = getattr(a, column), getattr(b, column)
        if a.tokens and b.tokens and all(seconds):
            timed.append((seconds[0], a.tokens, seconds[1], b.tokens))
    if not timed:
        return None
    single = [(s / n) / (t / m) for s, n, t, m in timed]
    stock_s, stock_n, tlt_s, tlt_n = (sum(column) for column in zip(*timed, strict=True))
    return Ratio(mean=(stock_s / stock_n) / (tlt_s / tlt_n), low=min(single), high=max(single))


def rows_of_metrics_file(path: Path) -> list[StepRow]:
    """One row per training step in the output of verl's `file` logger ({"step": ..., "data": {...}} a line).

    Raises:
        TraceError: the file is missing or holds no training step.
    """
    rows: dict[int, StepRow] = {}
    try:
        lines = path.read_text().splitlines()
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
        for name, run, column in (
            ("rollout_ratio", steps, "rollout_s"),
            ("e2e_ratio", steps, "step_s"),
            ("warm_rollout_ratio", warm or (), "rollout_s"),
        ):
            found = ratio(stock, run, column)
            result[name] = found.mean if found else None
    return result
