"""Compares the demo's runs: verl-tlt, stock verl, and a run that starts with the trained drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tlt.report.reader import TraceError
from verl_tlt.report.rows import Row, step_row


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


def ratio(stock: Mapping[int, Row], tlt: Mapping[int, Row], column: str) -> Ratio | None:
    """How much faster `tlt` is than `stock` in "rollout_s" or "step_s", without the first step.

    Two runs of one seed sample different responses, hence per token. None without two steps to compare.
    """
    timed = []
    for step in sorted(stock.keys() & tlt.keys())[1:]:
        a, b = stock[step], tlt[step]
        numbers = [number for number in (a[column], a["tokens"], b[column], b["tokens"]) if number]
        if len(numbers) == 4:
            timed.append(numbers)
    if not timed:
        return None
    single = [(s / n) / (t / m) for s, n, t, m in timed]
    stock_s, stock_n, tlt_s, tlt_n = (sum(column) for column in zip(*timed, strict=True))
    return Ratio(mean=(stock_s / stock_n) / (tlt_s / tlt_n), low=min(single), high=max(single))


def rows_of_metrics_file(path: Path) -> dict[int, Row]:
    """One row per training step in the output of verl's `file` logger ({"step": ..., "data": {...}} a line).

    Raises:
        TraceError: the file is missing or holds no training step.
    """
    rows: dict[int, Row] = {}
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
            rows[record["step"]] = step_row(record["data"])
    if not rows:
        raise TraceError(f"verl's metrics file {path} holds no finished training step.")
    return dict(sorted(rows.items()))


def summary(
    seconds: float,
    steps: Mapping[int, Row],
    stock: Mapping[int, Row] | None = None,
    warm: Mapping[int, Row] | None = None,
) -> dict[str, Any]:
    """What `summary.json` holds; with `stock` also the ratios, null where there is nothing to compare."""
    result: dict[str, Any] = {"seconds": seconds, "steps": _listed(steps)}
    if stock is not None:
        result["stock"] = _listed(stock)
        for name, run, column in (
            ("rollout_ratio", steps, "rollout_s"),
            ("e2e_ratio", steps, "step_s"),
            ("warm_rollout_ratio", warm or {}, "rollout_s"),
        ):
            found = ratio(stock, run, column)
            result[name] = found.mean if found else None
    return result


def _listed(rows: Mapping[int, Row]) -> list[dict[str, float | None]]:
    return [{"step": step, **row} for step, row in rows.items()]
