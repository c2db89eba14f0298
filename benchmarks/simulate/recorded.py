"""What a real engine showed, made ready for replay: latency by batch and draft length, acceptance, jitter.

Input is the engine trace that `speculation/step_statistics.py` writes, one JSON line per engine step.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.types import OFF, StepRecord

_FEWEST = 3
"""Clean steps a point of the table needs."""


@dataclass(frozen=True)
class Recording:
    """One engine's steps, condensed."""

    table: LatencyTable
    """Median seconds by half-octave of batch and draft length."""
    acceptance: tuple[float, ...]
    """Conditional acceptance per draft position over the whole recording."""
    jitter: float
    """Typical relative deviation of a step from the median of its kind."""


def step_records(lines: Iterable[str]) -> Iterator[StepRecord]:
    """Steps of an engine trace; lines that are cut short or empty are skipped.

    Raises:
        KeyError: a line lacks a field of the trace.
    """
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        yield StepRecord(
            batch=row["batch"],
            kv_tokens=row["kv"],
            drafted=row["k"],
            verified=row["verified"],
            num_drafts=row["drafts"],
            num_accepted_tokens_per_pos=tuple(row["accepted"]),
            produced=row["produced"],
            latency_s=row["latency_s"],
            clean=row["clean"],
        )


def recording(steps: Iterable[StepRecord]) -> Recording:
    """Condense steps; only clean ones with a steady draft length say what a step costs."""
    kinds: dict[tuple[int, int], list[StepRecord]] = defaultdict(list)
    drafts: dict[int, int] = defaultdict(int)
    accepted: dict[int, int] = defaultdict(int)
    for step in steps:
        if step.clean and step.batch > 0 and (step.drafted == OFF or step.drafted == step.verified):
            kinds[round(2.0 * math.log2(step.batch)), step.drafted].append(step)
        trials = step.num_drafts
        for position, hits in enumerate(step.num_accepted_tokens_per_pos):
            drafts[position] += trials
            accepted[position] += hits
            trials = hits
    points, deviations = [], []
    for (_, draft_length), same in sorted(kinds.items()):
        if len(same) < _FEWEST:
            continue
        seconds = np.array([s.latency_s for s in same])
        median = float(np.median(seconds))
        batch, kv_tokens = (round(float(np.mean([getattr(s, name) for s in same]))) for name in ("batch", "kv_tokens"))
        points.append(LatencyPoint(batch, kv_tokens, draft_length, median, len(same)))
        deviations.append(float(np.median(np.abs(seconds / median - 1.0))) * 1.48)
    rates = tuple(accepted[i] / drafts[i] for i in sorted(drafts) if drafts[i] > 0)
    return Recording(LatencyTable(tuple(points)), rates, float(np.median(deviations)) if deviations else 0.0)


def worth(steps: Iterable[StepRecord], seconds: Callable[[int, int], float], accepted: Sequence[float]) -> float:
    """What the draft lengths of real steps are worth without the machine's noise, in percent of the best ones.

    Args:
        steps: of one engine; those that decoded nothing or ran without the drafter say nothing.
        seconds: what a step of (batch, K) costs on that machine, K from 0 to `len(accepted)`.
        accepted: share of drafts whose first i+1 tokens are accepted.

    Returns:
        Speed with the draft lengths that were chosen over speed with the best one at each step's batch; 0 for no steps.
    """
    tau = [1.0 + sum(accepted[:k]) for k in range(len(accepted) + 1)]  # [K+1]
    spent = least = 0.0
    for step in steps:
        if step.batch > 0 and step.drafted >= 0:
            cost = seconds(step.batch, step.drafted)
            fastest = max(tau[k] / seconds(step.batch, k) for k in range(len(tau)))  # [1/s]
            spent += cost
            least += tau[step.drafted] / fastest
    return 100.0 * least / spent if spent else 0.0
