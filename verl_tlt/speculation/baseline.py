"""What stock would have taken for the same tokens: the baseline of `tlt/saved_s` and of whether drafting pays.

Drafted steps are compared with live steps without the drafter: of a replica that was audited, or of rollouts in which
drafting was off, at the same batch and with the same number of busy replicas, because replicas of one machine slow each
other down. Where none was seen, the calibration counts, which was measured on one busy replica. Drafted steps teach
nothing here: a machine that drafting itself made slow would make stock look slow too. Pure functions of numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from verl_tlt.messages.rollout import Stretch
from verl_tlt.speculation.costs.latency_table import Table, interpolate, stock_share
from verl_tlt.speculation.costs.tables import StockPoint
from verl_tlt.speculation.types import OFF

KEPT = 0.5
"""What earlier steps at a load count when a new rollout has some."""
UNMIXED = 0.1
"""Busy replicas on average may differ by this from a whole number in a stretch that teaches."""
REACH = 1.5
"""Batches are compared with one that was seen up to this factor away, where no calibration tells how costs grow."""

Rollout = Mapping[str, Sequence[Stretch]]
"""By replica, in order of time."""


@dataclass(frozen=True)
class Savings:
    """What a rollout gained by drafting."""

    rollout_s: float | None = None
    """Seconds by which it ended earlier than stock's would have; negative: later. None: too little to compare."""
    of: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Replica → (seconds that decoding in OFF would have taken more, seconds compared)."""


class Baseline:
    """Seconds of a step without the drafter, by batch and by how many replicas are busy.

    Args:
        shared: the replicas share a machine, and slow each other down; else each has devices of its own, and what one
            was seen to take holds however many others are busy.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._calibrated: Sequence[tuple[int, float]] = ()
        self._stock: Sequence[StockPoint] = ()
        self._seen: dict[int, dict[int, tuple[float, float, float]]] = {}  # busy → bucket → (seconds, steps, Σ batch)

    def calibrated(self, table: Table, stock: Sequence[StockPoint]) -> None:
        """Take note of what was measured ahead, and of what stock vLLM takes of a step in OFF."""
        self._calibrated, self._stock = table.get(OFF, ()), stock

    def learn(self, rollout: Rollout) -> None:
        """Take note of a rollout's live steps without the drafter."""
        fresh: dict[tuple[int, int], list[float]] = {}
        for _, stretch, average in _with_busy(rollout):
            busy = round(average)
            # Where another replica came or went, half of the time is of another kind.
            if stretch.off and stretch.stock_steps > 0 and abs(average - busy) < UNMIXED:
                sums = fresh.setdefault((busy, round(4 * math.log2(stretch.batch))), [0.0, 0.0, 0.0])
                steps = stretch.stock_steps
                for i, value in enumerate((stretch.seconds, steps, steps * stretch.batch)):
                    sums[i] += value
        for (busy, bucket), (seconds, steps, batches) in fresh.items():
            old = self._seen.setdefault(busy, {}).get(bucket, (0.0, 0.0, 0.0))
            kept = KEPT if steps >= old[1] * KEPT else 1.0  # a handful of steps replaces nothing
            self._seen[busy][bucket] = (
                kept * old[0] + seconds, kept * old[1] + steps, kept * old[2] + batches,
            )  # fmt: skip

    def off_seconds(self, batch: float, busy: int) -> float | None:
        """Of a step without the drafter; None: never seen at such a load."""
        seen = self._seen.get(busy)
        if seen is None and not self._shared and self._seen:
            seen = self._seen[min(self._seen, key=lambda other: abs(other - busy))]
        usual = interpolate(self._calibrated, batch) if self._calibrated else None
        if seen is None:
            return usual if busy <= 1 or not self._shared else None
        points = sorted((batches / steps, seconds / steps) for seconds, steps, batches in seen.values())
        nearest, there = min(points, key=lambda point: abs(math.log(point[0] / batch)))
        if points[0][0] <= batch <= points[-1][0]:
            return between(points, batch)
        if usual is not None:
            return there * usual / interpolate(self._calibrated, nearest)
        return there if max(nearest / batch, batch / nearest) <= REACH else None

    def savings(self, rollout: Rollout) -> Savings:
        """What drafting saved in a rollout, which ends with its last replica."""
        by_replica: dict[str, list[tuple[Stretch, float]]] = {}
        for name, row, busy in _with_busy(rollout):
            by_replica.setdefault(name, []).append((row, busy))
        of = {name: self._against_off(rows) for name, rows in by_replica.items()}
        spent = sum(row.seconds for rows in rollout.values() for row in rows)
        if not spent or sum(compared for _, compared in of.values()) < spent / 2:
            return Savings(None, of)
        end = max(rows[-1].end for rows in rollout.values() if rows)
        return Savings(max(self._stock_end(rows) for rows in by_replica.values()) - end, of)

    def _against_off(self, rows: Sequence[tuple[Stretch, float]]) -> tuple[float, float]:
        """(seconds that OFF would have taken more, seconds compared)."""
        saved_s = compared_s = 0.0
        for row, busy in rows:
            step_s = self.off_seconds(row.batch, round(busy)) if row.seconds > 0 else None
            if step_s is not None:
                saved_s += 0.0 if row.off else row.stock_steps * step_s - row.seconds
                compared_s += row.seconds
        return saved_s, compared_s

    def _stock_end(self, rows: Sequence[tuple[Stretch, float]]) -> float:
        """When stock would have ended what one replica decoded; its prefills and pauses are what they were."""
        late = 0.0
        for row, busy in rows:
            step_s = self.off_seconds(row.batch, round(busy)) if row.seconds > 0 else None
            if step_s is not None:
                off_s = row.seconds if row.off else row.stock_steps * step_s
                late += off_s * stock_share(self._stock, row.batch) - row.seconds
        return rows[-1][0].end + late


def _with_busy(rollout: Rollout) -> list[tuple[str, Stretch, float]]:
    """Every stretch with the number of replicas that were busy in it on average, its own included."""
    edges = sorted(
        [(row.start, 1) for rows in rollout.values() for row in rows]
        + [(row.end, -1) for rows in rollout.values() for row in rows]
    )
    times, counts, sums = [time for time, _ in edges], list(accumulate(change for _, change in edges)), [0.0]
    for (begin, end), count in zip(pairwise(times), counts, strict=False):
        sums.append(sums[-1] + count * (end - begin))

    def until(time: float) -> float:
        """Seconds that replicas were busy before `time`, which is one of the edges."""
        return sums[bisect_left(times, time)]

    return [
        (name, row, max(1.0, (until(row.end) - until(row.start)) / max(row.end - row.start, 1e-9)))
        for name, rows in rollout.items() for row in rows
    ]  # fmt: skip


def between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear between sorted points, within which `at` lies."""
    after = next(i for i, (x, _) in enumerate(points) if x >= at)
    (x1, y1), (x0, y0) = points[after], points[max(after - 1, 0)]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
