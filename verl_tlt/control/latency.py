"""Seconds an engine step takes, T(batch, KV tokens, K), learned online from clean steps.

Three layers, from coarse to fine:

* a fitted roofline (`roofline.py`) carries what a handful of steps teach to batches and draft lengths never seen;
* one correction factor per cell (half-octave of batch x octave of context per request x K), because real kernels and
  CUDA graphs do not follow rooflines;
* one pace for all, because a busy or throttled machine slows every draft length alike.

Samples enter through Huber's clip, so that stalls and first uses of a shape do not teach. A cell that has never been
measured borrows from its neighbours and is clamped between the measured draft lengths below and above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from verl_tlt.control.costs import LatencyPoint, LatencyTable
from verl_tlt.control.roofline import Roofline
from verl_tlt.control.types import OFF

_HOLD_BACK = 3
"""A cell's first samples are judged by their median: the first use of a shape often compiles or allocates."""
_CLIP = 2.5
"""Huber's threshold in standard deviations."""
_MATURE = 24
"""Samples after which a persistent surprise is put down to the machine's pace rather than to the cell."""
_REFIT_EVERY = 128
_UNSEEN_SPREAD = 0.08
"""Relative uncertainty of a cell known from neighbours only."""

Key = tuple[int, int, int]


class _Factor(NamedTuple):
    """What one bucket says about one draft length."""

    factor: float
    """Multiplies the roofline; the common pace is included."""
    sigma: float
    """Relative uncertainty."""
    ceiling: tuple[int, float] | tuple[()] | None
    """None where measured; else (K, factor) of the next longer draft measured here, empty if there is none."""


class _Cell:
    """What one (batch bucket, context bucket, K) taught: log correction, spread, and where its samples lay."""

    __slots__ = ("batch", "draft_length", "first", "kv_tokens", "level", "samples", "spread")

    def __init__(self, draft_length: int) -> None:
        self.draft_length = draft_length
        self.level, self.spread = 0.0, 0.05
        self.batch, self.kv_tokens = 0.0, 0.0
        self.samples = 0.0
        self.first: list[float] = []


class LatencyModel:
    """T(batch, kv_tokens, K) for every arm, OFF included.

    Args:
        arms: draft lengths it will be asked about, ascending; OFF is always known as well.
        table: measurements of an earlier run or a calibration; they count as a few samples each and are soon
            outvoted where they are wrong.
        memory: samples after which a cell's older samples count 1/e.
    """

    def __init__(self, arms: Sequence[int], *, table: LatencyTable | None = None, memory: float = 96.0) -> None:
        self._arms = tuple(arms)
        self._memory = memory
        self._shape = Roofline()
        self._cells: dict[Key, _Cell] = {}
        self._pace = 0.0
        self._count = 0
        self._next_fit = 1
        self._cache: dict[tuple[int, int], list[_Factor]] = {}
        if table is not None:
            self.seed(table)

    def seed(self, table: LatencyTable) -> None:
        """Believe a stored table until measurements say otherwise."""
        for p in table.points:
            cell = self._cells.setdefault(_key(p.batch, p.kv_tokens, p.draft_length), _Cell(p.draft_length))
            cell.batch, cell.kv_tokens = float(p.batch), float(p.kv_tokens)
            cell.samples = float(min(max(p.samples, _HOLD_BACK), 8))
            shape = self._shape.seconds(p.batch, p.kv_tokens, p.draft_length)
            if shape <= 0.0:
                self._shape.weights[0] = shape = p.seconds
            cell.level = math.log(p.seconds / shape)
        if table.points:
            self._refit(sweeps=200)

    def observe(self, batch: int, kv_tokens: int, draft_length: int, seconds: float) -> None:
        """Learn from one clean step that verified `draft_length` and drafted as many again."""
        if seconds <= 0.0 or batch <= 0:
            return
        if not self._cells:
            self._shape.weights[0] = seconds
        key = _key(batch, kv_tokens, draft_length)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(draft_length)
            cell.level = self._borrowed(key)[0]
            cell.batch, cell.kv_tokens = float(batch), float(kv_tokens)
        shape = self._shape.seconds(batch, kv_tokens, draft_length)
        self._learn(cell, math.log(seconds / shape))
        share = 1.0 / min(cell.samples, self._memory)
        cell.batch += share * (batch - cell.batch)
        cell.kv_tokens += share * (kv_tokens - cell.kv_tokens)
        self._cache.pop(key[:2], None)
        self._count += 1
        if self._count >= self._next_fit:
            self._refit()

    def seconds(self, batch: int, kv_tokens: int, draft_length: int) -> float:
        """Expected seconds of one steady step at this load; 0.0 while nothing at all was measured."""
        position = 0 if draft_length == OFF else 1 + self._arms.index(draft_length)
        return self.predict(batch, kv_tokens)[position][0]

    def predict(self, batch: int, kv_tokens: int) -> list[tuple[float, float]]:
        """(seconds, relative uncertainty) for OFF and then every arm."""
        if not self._cells:
            return [(0.0, 1.0)] * (1 + len(self._arms))
        factors = self._factors(*_key(batch, kv_tokens, 0)[:2])
        found, floor = [], 0.0
        for k, (factor, sigma, ceiling_of) in zip((OFF, *self._arms), factors, strict=True):
            seconds = self._shape.seconds(batch, kv_tokens, k) * factor
            if ceiling_of is None:
                floor = seconds
            else:
                # Not measured here: at least as slow as the shorter draft that was, at most as slow as the longer.
                above = ceiling_of and self._shape.seconds(batch, kv_tokens, ceiling_of[0]) * ceiling_of[1]
                seconds = max(floor, min(seconds, above) if above else seconds)
            found.append((seconds, sigma))
        return found

    def to_table(self) -> LatencyTable:
        """Every measured cell as one point, for the store."""
        points = []
        for cell in self._cells.values():
            if cell.samples >= 1:
                shape = self._shape.seconds(cell.batch, cell.kv_tokens, cell.draft_length)
                seconds = shape * math.exp(cell.level + self._pace)
                where = round(cell.batch), round(cell.kv_tokens)
                points.append(LatencyPoint(*where, cell.draft_length, seconds, round(cell.samples)))
        return LatencyTable(tuple(points))

    def _learn(self, cell: _Cell, log_ratio: float) -> None:
        """Update one cell's level, its spread and the common pace from log(measured / shape)."""
        surprise = log_ratio - self._pace - cell.level
        if cell.samples < _HOLD_BACK:
            cell.first.append(log_ratio - self._pace)
            cell.samples += 1.0
            # The lower median: a stalled first sample is forgotten as soon as there is a second.
            cell.level = sorted(cell.first)[(len(cell.first) - 1) // 2]
            return
        clip = _CLIP * cell.spread
        clipped = max(-clip, min(clip, surprise))
        # 1.3 keeps the scale estimate unbiased under the clip for Gaussian noise; stalls move it little.
        cell.spread += 0.05 * (1.3 * min(abs(surprise), 2.0 * clip) - cell.spread)
        cell.spread = max(cell.spread, 0.002)
        cell.samples = min(cell.samples + 1.0, self._memory)
        if cell.samples >= _MATURE:
            self._pace += 0.04 * clipped
            cell.level += clipped / cell.samples * 0.5
        else:
            cell.level += clipped / cell.samples

    def _factors(self, batch_bucket: int, context_bucket: int) -> list[_Factor]:
        """Correction of OFF and every arm in one bucket, cached until the bucket or the shape changes."""
        found = self._cache.get((batch_bucket, context_bucket))
        if found is None:
            found = []
            ceiling: tuple[int, float] | tuple[()] = ()
            for k in reversed((OFF, *self._arms)):
                cell = self._cells.get((batch_bucket, context_bucket, k))
                if cell is not None and cell.samples >= 1:
                    factor = math.exp(cell.level + self._pace)
                    young = 0.02 if cell.samples < _HOLD_BACK else 0.0
                    found.append(_Factor(factor, cell.spread / math.sqrt(cell.samples) + young, None))
                    ceiling = (k, factor)
                else:
                    level, sigma = self._borrowed((batch_bucket, context_bucket, k))
                    found.append(_Factor(math.exp(level + self._pace), sigma, ceiling))
            found.reverse()
            self._cache[batch_bucket, context_bucket] = found
        return found

    def _borrowed(self, key: Key) -> tuple[float, float]:
        """Correction of an unmeasured cell: the average of its neighbours, by distance."""
        total, votes, nearest = 0.0, 0.5, 9.0
        for (b, c, k), cell in self._cells.items():
            distance = (0.5 * (b - key[0])) ** 2 + (0.5 * (c - key[1])) ** 2 + (0.7 * (k - key[2])) ** 2
            if distance < 9.0 and cell.samples >= 1:
                vote = math.exp(-distance) * min(cell.samples, 8.0)
                total, votes = total + vote * cell.level, votes + vote
                nearest = min(nearest, distance)
        return total / votes, 0.02 + _UNSEEN_SPREAD * min(1.0, math.sqrt(nearest) / 3.0)

    def _refit(self, sweeps: int = 12) -> None:
        """Fit the shape to what the cells believe, then restate the cells relative to the new shape."""
        cells = [c for c in self._cells.values() if c.samples >= 1]
        rows = [(c.batch, c.kv_tokens, c.draft_length) for c in cells]
        believed = [self._shape.seconds(*row) * math.exp(c.level) for row, c in zip(rows, cells, strict=True)]
        self._shape.fit(rows, believed, [min(c.samples, 16.0) for c in cells], sweeps)
        for row, seconds, cell in zip(rows, believed, cells, strict=True):
            shift = math.log(seconds / max(self._shape.seconds(*row), 1e-12)) - cell.level
            cell.level += shift
            cell.first = [x + shift for x in cell.first]
        self._cache.clear()
        self._next_fit = max(self._count + 1, min(2 * self._count, self._count + _REFIT_EVERY))


def _key(batch: float, kv_tokens: float, draft_length: int) -> Key:
    """Half-octaves of batch, octaves of context per request."""
    per_request = kv_tokens / batch if batch > 0 else 0.0
    return round(2.0 * math.log2(max(batch, 1.0))), round(math.log2(per_request + 64.0)), draft_length
