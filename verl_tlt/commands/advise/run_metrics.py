"""What a run with stock verl showed: means over its steps from verl's metrics.

They are read from verl's `file` logger (`{"step": ..., "data": {...}}` a line) or from its console lines
(`step:3 - timing_s/gen:12.5 - ...`), whatever else the log holds. The first step and steps with validation or a
checkpoint are left out where there are others: they take longer than those that follow.
"""

import json
import os
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tlt.commands.advise.hardware import Workload
from verl_tlt.errors import TLTError

NEEDED = ("timing_s/gen", "timing_s/step", "response_length/mean", "response_length/max")
"""Metrics without which a step is not finished."""
MOST_LOG_BYTES, LARGEST = 1 << 30, 1e12
_CONSOLE = re.compile(r"step:(\d+) - (\S.*)")
_ENTRY = re.compile(r"(\S+):(?:np\.float\d+\()?([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\)?$")


@dataclass(frozen=True)
class RunMetrics:
    """Means over a run's steps; None: not logged. Seconds are wall clock."""

    source: str
    steps: int
    gen_s: float
    step_s: float
    response_mean: float
    response_max: float
    """Mean over steps of each step's longest."""
    clipped: float
    """Share of responses as long as their step's longest (`response_length/clip_ratio`)."""
    longest: float
    """Tokens of the longest response of all steps."""
    prompt_mean: float | None = None
    reward_s: float | None = None
    tool_share: float | None = None
    """Share of a response's time in which it waits for tools."""

    @property
    def rest_s(self) -> float:
        return max(0.0, self.step_s - self.gen_s)


def read_metrics(path: Path) -> RunMetrics:
    """A run's means from verl's metrics file or console log; raises `TLTError` where neither shows a finished step."""
    steps: dict[int, dict[str, float]] = {}
    try:
        if (size := os.stat(path).st_size) > MOST_LOG_BYTES:
            raise TLTError(f"--metrics {path} has {size >> 20} MiB, more than any run's metrics.")
        with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
            for line in file:
                if (row := _parsed(line)) is not None:
                    steps.setdefault(row[0], {}).update(row[1])
    except OSError as error:
        raise TLTError(f"--metrics {path} cannot be read: {error.strerror or error}.") from error
    return _summary(steps, f"--metrics {path}")


def _parsed(line: str) -> tuple[int, dict[str, float]] | None:
    if line.lstrip().startswith("{"):
        try:
            record = json.loads(line)
            return int(record["step"]), _known(record["data"].items())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None
    match = _CONSOLE.search(line)
    if match is None:
        return None
    entries = (_ENTRY.match(entry) for entry in match[2].split(" - "))
    return int(match[1][:18]), _known((e[1], float(e[2])) for e in entries if e is not None)


def _known(entries: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Those metrics that are numbers which a run can have: none that decides here is below 0, nor NaN."""
    return {name: float(v) for name, v in entries if isinstance(v, int | float) and 0 <= v < LARGEST}


def _summary(steps: Mapping[int, Mapping[str, float]], source: str) -> RunMetrics:
    finished = {step: m for step, m in steps.items() if all(m.get(name, 0.0) > 0 for name in NEEDED)}
    if not finished:
        raise TLTError(f"{source} holds no finished training step with {', '.join(NEEDED)}.")
    if any(name.startswith("tlt/") for metrics in finished.values() for name in metrics):
        raise TLTError(f"{source} is of a run with TLT, of which verl-tlt report tells: give a stock run's metrics.")
    slow = ("timing_s/testing", "timing_s/save_checkpoint")
    plain = [m for step, m in finished.items() if step != min(finished) and not any(name in m for name in slow)]
    rows = plain or list(finished.values())

    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if name in row]
        return statistics.fmean(values) if values else None

    gen_s, step_s, response_mean, response_max = (mean(name) or 0.0 for name in NEEDED)
    tools, generate = (mean(f"timing_s/agent_loop/{part}/mean") for part in ("tool_calls", "generate_sequences"))
    return RunMetrics(
        source, len(rows), gen_s, step_s, response_mean, response_max,
        clipped=mean("response_length/clip_ratio") or 0.0,
        longest=max(row["response_length/max"] for row in rows),
        prompt_mean=mean("prompt_length/mean"),
        reward_s=mean("timing_s/reward"),
        tool_share=tools / (tools + generate) if tools is not None and generate else None,
    )  # fmt: skip


def check_same(run: RunMetrics, work: Workload) -> None:
    """Raise a `TLTError` where a run shows that it had another response limit than the recipe."""
    limit = f"data.max_response_length={work.response}"
    if run.longest > work.response:
        raise TLTError(f"{run.source} has responses of {run.longest:.0f} tokens, and the recipe {limit}.")
    # Several in each step, and in all steps of one length, which is shorter than the recipe's limit.
    if run.steps > 1 and run.response_max == run.longest < work.response and run.clipped * work.requests >= 2:
        raise TLTError(f"{run.source} cut its responses at {run.longest:.0f} tokens, and the recipe has {limit}.")
