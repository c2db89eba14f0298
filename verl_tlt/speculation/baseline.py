"""What stock would have taken for the same tokens: the baseline of `tlt/saved_s` and of whether drafting pays.

Drafted steps are compared with live steps without the drafter: of a replica that was audited, or of rollouts in which
drafting was off, at the same batch and with the same number of busy replicas, because replicas of one machine slow each
other down. One that drafts does so by another measure than stock's, so steps beside it teach nothing there. One that
trains does so too, and stock has none: whether drafting pays is asked of steps beside as many, what TLT saved of steps
beside none, the same for steps without drafts. Where none was seen, the calibration counts, which was measured on one
busy replica. Drafted steps teach nothing anywhere: a machine that drafting itself made slow would make stock look slow
too. Pure functions of numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from verl_tlt.messages.rollout import LoadInterval
from verl_tlt.speculation.costs.latency_table import Table, interpolate, stock_share
from verl_tlt.speculation.costs.tables import StockPoint
from verl_tlt.speculation.types import OFF

KEPT = 0.5
"""What earlier steps at a load count when a new rollout has some."""
UNMIXED = 0.1
"""Replicas that are busy on average, or train, may differ by this from a whole number in a stretch that teaches."""
REACH = 1.5
"""Batches are compared with one that was seen up to this factor away, where no calibration tells how costs grow."""

Rollout = Mapping[str, Sequence[LoadInterval]]
"""By replica, in order of time."""
_Buckets = dict[int, tuple[float, float, float]]
"""By size of batch: (seconds, steps, batches summed over them)."""
Times = Sequence[tuple[float, float]]
"""(start, end), unix seconds, in any order."""


class _Row(NamedTuple):
    """A stretch and what was beside it."""

    stretch: LoadInterval
    busy: float
    """Replicas that decoded, on average, its own included."""
    training: float
    """Replicas that trained, where that slows others down."""
    drafting: float
    """Replicas that decoded with drafts, its own included, where that matters to others."""

    @property
    def as_stock(self) -> bool:
        """Neither it nor anybody beside it drafted."""
        return self.stretch.off and self.drafting < UNMIXED


@dataclass(frozen=True)
class Savings:
    """What a rollout gained by TLT."""

    rollout_s: float | None = None
    """Seconds by which it ended earlier than stock's would have; negative: later. None: too little to compare."""
    drafting_s: float | None = None
    """The same, had stock trained beside its decoding as this rollout did: what speculation alone brought."""
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
        self._seen: dict[tuple[int, int], _Buckets] = {}  # by replicas that decode, and that train

    def calibrated(self, table: Table, stock: Sequence[StockPoint]) -> None:
        """Take note of what was measured ahead, and of what stock vLLM takes of a step in OFF."""
        self._calibrated, self._stock = table.get(OFF, ()), stock

    def learn(self, rollout: Rollout, training: Times = ()) -> None:
        """Take note of a rollout's live steps without the drafter.

        Args:
            rollout: its stretches.
            training: when a replica trained.
        """
        fresh: dict[tuple[int, int], _Buckets] = {}
        for row in chain(*self._beside(rollout, training).values()):
            stretch, load = row.stretch, (round(row.busy), round(row.training))
            # Where another replica came or went, half of the time is of another kind.
            unmixed = max(abs(row.busy - load[0]), abs(row.training - load[1])) < UNMIXED
            if row.as_stock and stretch.plain_steps > 0 and unmixed:
                steps, buckets = stretch.plain_steps, fresh.setdefault(load, {})
                bucket = round(4 * math.log2(stretch.batch))
                old = buckets.get(bucket, (0.0, 0.0, 0.0))
                buckets[bucket] = (old[0] + stretch.seconds, old[1] + steps, old[2] + steps * stretch.batch)
        for load, buckets in fresh.items():
            seen = self._seen.setdefault(load, {})
            for bucket, new in buckets.items():
                old = seen.get(bucket, (0.0, 0.0, 0.0))
                kept = KEPT if new[1] >= old[1] * KEPT else 1.0  # a handful of steps replaces nothing
                seen[bucket] = (kept * old[0] + new[0], kept * old[1] + new[1], kept * old[2] + new[2])

    def off_seconds(self, batch: float, busy: int, training: int = 0) -> float | None:
        """Of a step without the drafter; None: never seen at such a load."""
        seen = self._seen.get((busy, training))
        if seen is None and not self._shared and self._seen:
            seen = self._seen[min(self._seen, key=lambda other: abs(other[0] - busy))]
        usual = interpolate(self._calibrated, batch) if self._calibrated else None
        if seen is None:
            return usual if busy + training <= 1 or not self._shared else None
        points = sorted((batches / steps, seconds / steps) for seconds, steps, batches in seen.values())
        nearest, there = min(points, key=lambda point: abs(math.log(point[0] / batch)))
        if points[0][0] <= batch <= points[-1][0]:
            return between(points, batch)
        if usual is not None:
            return there * usual / interpolate(self._calibrated, nearest)
        return there if max(nearest / batch, batch / nearest) <= REACH else None

    def savings(self, rollout: Rollout, training: Times = ()) -> Savings:
        """What TLT saved in a rollout, which ends with its last replica; arguments as `learn` has them."""
        by_replica = self._beside(rollout, training)
        of = {name: self._against_off(rows) for name, rows in by_replica.items()}
        return Savings(self._earlier(by_replica, trains=False), self._earlier(by_replica, trains=True), of)

    def _against_off(self, rows: Sequence[_Row]) -> tuple[float, float]:
        """(seconds that OFF would have taken more, seconds compared)."""
        saved_s = compared_s = 0.0
        for row, busy, training, _ in rows:
            step_s = self.off_seconds(row.batch, round(busy), round(training)) if row.seconds > 0 else None
            if step_s is not None:
                saved_s += 0.0 if row.off else row.plain_steps * step_s - row.seconds
                compared_s += row.seconds
        return saved_s, compared_s

    def _earlier(self, by_replica: Mapping[str, Sequence[_Row]], trains: bool) -> float | None:
        """Seconds by which the rollout ended earlier than stock's, whose prefills and pauses are what they were.

        Args:
            by_replica: in order of time.
            trains: the stock that is compared with trains beside its decoding as this rollout did.
        """
        spent_s = compared_s = 0.0
        ends = []
        for rows in by_replica.values():
            late = 0.0
            for row in rows:
                stretch, beside = row.stretch, round(row.training) if trains else 0
                step_s = self.off_seconds(stretch.batch, round(row.busy), beside) if stretch.seconds > 0 else None
                spent_s += stretch.seconds
                if step_s is not None:
                    as_stock = row.as_stock and (trains or row.training < UNMIXED)
                    off_s = stretch.seconds if as_stock else stretch.plain_steps * step_s
                    late += off_s * stock_share(self._stock, stretch.batch) - stretch.seconds
                    compared_s += stretch.seconds
            ends.append((rows[-1].stretch.end, late))
        if not spent_s or compared_s < spent_s / 2:
            return None
        return max(end + late for end, late in ends) - max(end for end, _ in ends)

    def _beside(self, rollout: Rollout, training: Times) -> dict[str, list[_Row]]:
        """Every stretch of every replica with what was beside it."""
        every = [row for rows in rollout.values() for row in rows]
        busy = _Count([(row.start, row.end) for row in every])
        trained = _Count(training if self._shared else ())
        drafting = _Count([(row.start, row.end) for row in every if not row.off] if self._shared else ())

        def seen(row: LoadInterval) -> _Row:
            beside = [count.average(row.start, row.end) for count in (busy, trained, drafting)]
            return _Row(row, max(1.0, beside[0]), *beside[1:])

        return {name: [seen(row) for row in rows] for name, rows in rollout.items() if rows}


class _Count:
    """How many of some spans of time there were at a time."""

    def __init__(self, spans: Times) -> None:
        edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        self._times = [time for time, _ in edges]
        self._counts = list(accumulate(change for _, change in edges))
        self._sums = [0.0]
        for (begin, end), count in zip(pairwise(self._times), self._counts, strict=False):
            self._sums.append(self._sums[-1] + count * (end - begin))

    def average(self, start: float, end: float) -> float:
        """Over a span of time."""
        return (self._until(end) - self._until(start)) / max(end - start, 1e-9)

    def _until(self, time: float) -> float:
        """Seconds of all spans before a time."""
        i = bisect_left(self._times, time)
        return self._sums[i - 1] + self._counts[i - 1] * (time - self._times[i - 1]) if i else 0.0


def between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear between sorted points, within which `at` lies."""
    after = next(i for i, (x, _) in enumerate(points) if x >= at)
    (x1, y1), (x0, y0) = points[after], points[max(after - 1, 0)]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
