"""Measured seconds per engine step, by draft length and batch: `{arm: [(batch, seconds), ...]}`.

One small table travels between the calibration that measures it, the policy that plans with it, and the account of
what speculation saved against stock decoding (arm OFF). Pure Python: it is read in the driver and in vLLM's process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable, StockPoint
from verl_tlt.speculation.types import OFF

Table = dict[int, list[tuple[int, float]]]
CONTEXT_TOKENS = 32
"""Context per request that the table stands for: calibration decodes short prompts a little way."""

CALIBRATED_SAMPLES = 4
"""Steps of a run that a calibrated figure is worth: it is the lower of medians over about as many."""


def parse(node: Mapping[Any, Iterable[Sequence[float]]]) -> Table:
    """A table from JSON, whose keys are strings and whose pairs are lists; points come back sorted by batch.

    Raises:
        ValueError: an arm or batch that is no integer, a batch below 1, or seconds that are not above 0.
    """
    table: Table = {}
    for arm, points in node.items():
        rows = sorted((int(batch), float(seconds)) for batch, seconds in points)
        for batch, seconds in rows:
            if batch < 1 or not 0.0 < seconds < float("inf"):
                raise ValueError(f"latency table, arm {arm}: batch {batch} took {seconds} s, which cannot be.")
        if rows:
            table[int(arm)] = rows
    return table


def interpolate(points: Sequence[tuple[float, float]], batch: float) -> float:
    """Seconds at `batch`: linear between measured points, the last slope beyond them, flat below the first.

    Args:
        points: at least one (batch, seconds), sorted by batch.
        batch: requests in the step.
    """
    low_batch, low = points[0]
    if batch <= low_batch or len(points) == 1:
        return low
    for high_batch, high in points[1:]:
        if batch <= high_batch:
            break
        if high_batch != points[-1][0]:
            low_batch, low = high_batch, high
    slope = (high - low) / (high_batch - low_batch)
    # Noise can make the last slope negative; a larger batch never takes less than the largest one measured.
    return max(high if batch > high_batch else 0.0, low + slope * (batch - low_batch))


def stock_share(stock: Sequence[StockPoint], batch: float) -> float:
    """What stock vLLM's step takes of one in OFF at this batch, between measured ones; 1 where nothing was measured."""
    shares = [(p.batch, p.stock_s / p.off_s) for p in stock]
    within = min(batch, shares[-1][0]) if shares else 0.0
    return interpolate(shares, within) if shares else 1.0


def fill_arms(table: Table, arms: Iterable[int]) -> Table:
    """`table` with every arm in it: the missing draft lengths are linear in K between their measured neighbours.

    One more drafted token costs one more drafter pass and one more verified position, so step time is close to linear
    in K at a given batch. Arms outside the measured range are left out; OFF (below 0) is never interpolated.
    """
    measured = sorted(k for k in table if k >= 0)
    filled = dict(table)
    for arm in arms:
        if arm in filled or not measured or not measured[0] < arm < measured[-1]:
            continue
        below = max(k for k in measured if k < arm)
        above = min(k for k in measured if k > arm)
        share = (arm - below) / (above - below)
        filled[arm] = [
            (batch, (1 - share) * interpolate(table[below], batch) + share * interpolate(table[above], batch))
            for batch in sorted({b for b, _ in table[below]} & {b for b, _ in table[above]})
        ]
    return {k: v for k, v in filled.items() if v}


def cheapest_off(table: Table) -> Table:
    """`table` with OFF no dearer than K=0 at any batch, of which it is a part: a stall was measured where it is."""
    zero = dict(table.get(0, ()))
    off = [(batch, min(seconds, zero.get(batch, seconds))) for batch, seconds in table.get(OFF, ())]
    return {**table, OFF: off} if off else table


def from_stored(stored: LatencyTable, arms: Iterable[int], batches: Iterable[int]) -> Table:
    """The calibration in a stored table; empty where it does not cover what is asked.

    What the run learned besides is left to the policy: each draft length at other times and contexts.

    Args:
        stored: of the same hardware, model and vLLM.
        arms: the policy's draft lengths; the first, the last and OFF must have been calibrated.
        batches: to tell the latency of; none may be larger than the largest calibrated.
    """
    lengths, wanted = tuple(arms), sorted(batches)
    found: Table = {}
    for p in stored.calibration().points:
        found.setdefault(p.draft_length, []).append((p.batch, p.seconds))
    found = fill_arms({arm: sorted(row) for arm, row in found.items()}, lengths)
    if not {OFF, *lengths} <= found.keys() or wanted[-1] > found[OFF][-1][0]:
        return {}
    return {arm: [(batch, interpolate(found[arm], batch)) for batch in wanted] for arm in (OFF, *lengths)}


def filled_arms(table: Table) -> set[int]:
    """Draft lengths of which nothing was measured: all their points lie where `fill_arms` puts them."""
    lengths, found = sorted(k for k in table if k >= 0), set()
    for arm in lengths[1:-1]:
        for below, above in ((b, a) for b in lengths for a in lengths if b < arm < a):
            line = dict(fill_arms({below: table[below], above: table[above]}, (arm,)).get(arm, ()))
            if all(math.isclose(line.get(batch, 0.0), seconds, rel_tol=1e-6) for batch, seconds in table[arm]):
                found.add(arm)
    return found


def for_policy(table: Table) -> LatencyTable:
    """The same measurements as the policies read them, with the context they were made at; lines are no samples."""
    filled = filled_arms(table)
    return LatencyTable(
        tuple(
            LatencyPoint(batch, batch * CONTEXT_TOKENS, arm, seconds, 0 if arm in filled else CALIBRATED_SAMPLES, True)
            for arm, row in table.items()
            for batch, seconds in row
        )
    )
