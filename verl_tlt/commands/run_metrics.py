"""Reads the metrics that verl logged in a run: its `file` logger, its console lines, or a CSV exported from W&B."""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_tlt.commands.console import without_colours
from verl_tlt.errors import TLTError

Row = tuple[int, dict[str, float]]
"""An RL step and its metrics."""

STEP_COLUMNS = ("Step", "_step", "step", "training/global_step")
"""Names of the CSV column that counts RL steps: W&B's panels, W&B's history, others."""
WANDB_LIMITS = ("__MIN", "__MAX")
"""Endings of the two columns that W&B adds beside every metric."""
_CONSOLE = re.compile(r"step:(\d+) - (\S.*)")
_ENTRY = re.compile(r"(\S+?):(?:np\.\w+\()?([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\)?(?:\s|$)")


@dataclass
class LoggedRun:
    """The metrics of one run."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    """RL step -> its metrics, in the order in which they were logged."""
    starts: set[int] = field(default_factory=set)
    """The first RL step after each start that the log shows. It is slow: everything is used for the first time."""


def read_runs(paths: Sequence[Path]) -> LoggedRun:
    """Read several files of one run; what they say of a step is put together."""
    run = LoggedRun()
    for path in paths:
        part = read_run(path)
        run.starts |= part.starts
        for step, metrics in part.steps.items():
            run.steps.setdefault(step, {}).update(metrics)
    return run


def read_run(path: Path) -> LoggedRun:
    """Read one file. Lines without metrics are skipped; a resumed run repeats steps, of which the last ones count."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            if path.suffix.lower() == ".csv":
                return put_together(_csv_rows(path, lines))
            return put_together(_log_rows(lines))
    except OSError as error:
        raise TLTError(f"{path} cannot be read: {error.strerror or error}.") from error
    except csv.Error as error:
        raise TLTError(f"{path} cannot be read as CSV: {error}.") from error


def put_together(rows: Iterable[Row]) -> LoggedRun:
    """The run that logged these rows.

    A step number that is lower than the one before shows a restart, which repeats the steps from there on. If these are
    all steps, another run begins.
    """
    run = LoggedRun()
    last = -1
    for step, metrics in rows:
        if all(name.startswith("val") for name in metrics):
            continue  # a validation before the first step
        if step == last:  # several lines of one step
            run.steps[step].update(metrics)
            continue
        if step < last:
            run.steps = {earlier: logged for earlier, logged in run.steps.items() if earlier < step}
            run.starts = {start for start in run.starts if start < step}
        if step < last or not run.steps:
            run.starts.add(step)
        run.steps[step] = metrics
        last = step
    return run


def _log_rows(lines: Iterable[str]) -> Iterator[Row]:
    for line in map(without_colours, lines):
        if line.startswith("{"):
            try:
                record = json.loads(line)
                yield int(record["step"]), numbers(record["data"])
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                continue  # half a line, or not verl's
        elif match := _CONSOLE.search(line):
            yield int(match[1]), {name: float(value) for name, value in _ENTRY.findall(match[2])}


def _csv_rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    table = csv.DictReader(lines)
    columns = [name for name in table.fieldnames or () if name and not name.endswith(WANDB_LIMITS)]
    step_columns = [name for name in STEP_COLUMNS if name in columns]
    if not step_columns:
        raise TLTError(f"{path} has no column of RL steps: export it from W&B with the column Step or _step.")
    step_column = step_columns[0]
    others = [name for name in columns if name != step_column]
    metric_of = {name: name.rpartition(" - ")[2] for name in others}  # "my run - timing_s/gen"
    if len(set(metric_of.values())) < len(others):  # two runs, perhaps of one name
        raise TLTError(f"{path} has several columns of the same metric: export one run only.")
    for row in table:
        step = row[step_column]
        if step and step.replace(".", "", 1).isdecimal():
            yield int(float(step)), numbers({metric: row[name] for name, metric in metric_of.items()})


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those values that are finite numbers, also where they are written as text."""
    found = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            found[name] = number
    return found
