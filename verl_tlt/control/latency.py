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


class _Bucket(NamedTuple):
    """What one (batch, context) bucket says about OFF and every arm, by position."""

    factors: list[float]
    """Multiply the roofline."""
    sigmas: list[float]
    """Relative uncertainty."""
    unmeasured: list[int]
    """Positions that borrow from neighbours, ascending."""
    ceilings: dict[int, int | None]
    """For each of those: position of the next longer draft measured here."""


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
        self._all = (OFF, *arms)
        self._memory = memory
        self._shape = Roofline()
        self._cells: dict[Key, _Cell] = {}
        self._pace = 0.0
        self._count = 0
        self._next_fit = 1
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._base_batch = 0
        self._base: list[float] = []
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
        self._update_cache(key, cell)
        self._count += 1
        if self._count >= self._next_fit:
            self._refit()

    def seconds(self, batch: int, kv_tokens: int, draft_length: int) -> float:
        """Expected seconds of one steady step at this load; 0.0 while nothing at all was measured."""
        return self.predict(batch, kv_tokens)[self._all.index(draft_length)]

    def predict(self, batch: int, kv_tokens: int) -> list[float]:
        """Seconds for OFF and then every arm; zeros while nothing at all was measured."""
        if not self._cells:
            return [0.0] * len(self._all)
        pace, kv = math.exp(self._pace), self._shape.kv_token_s * kv_tokens
        known = self._bucket(batch, kv_tokens)
        found = [(base + kv) * factor * pace for base, factor in zip(self._bases(batch), known.factors, strict=True)]
        for arm in known.unmeasured:
            # Not measured here: at most as slow as the next longer draft that was, at least as slow as a shorter one.
            ceiling = known.ceilings[arm]
            if ceiling is not None:
                found[arm] = min(found[arm], found[ceiling])
            if arm > 0:
                found[arm] = max(found[arm], found[arm - 1])
        return found

    def uncertainty(self, batch: int, kv_tokens: int) -> list[float]:
        """Relative standard deviation of `predict`, arm by arm."""
        return list(self._bucket(batch, kv_tokens).sigmas) if self._cells else [1.0] * len(self._all)

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

    def _bases(self, batch: int) -> list[float]:
        """Shape without KV for OFF and every arm; the batch changes rarely, so the last answer is kept."""
        if batch != self._base_batch:
            self._base_batch, self._base = batch, [self._shape.without_kv(batch, k) for k in self._all]
        return self._base

    def _bucket(self, batch: int, kv_tokens: int) -> _Bucket:
        """The bucket of a load, put together on first use after a refit or a first measurement."""
        where = _key(batch, kv_tokens, 0)[:2]
        found = self._buckets.get(where)
        if found is None:
            found = self._buckets[where] = _Bucket([], [], [], {})
            for position, k in enumerate(self._all):
                cell = self._cells.get((*where, k))
                if cell is None:
                    found.unmeasured.append(position)
                level, sigma = _level_of(cell) if cell else self._borrowed((*where, k))
                found.factors.append(math.exp(level))
                found.sigmas.append(sigma)
            ceiling = None
            for position in reversed(range(len(self._all))):
                if position in found.unmeasured:
                    found.ceilings[position] = ceiling
                else:
                    ceiling = position
        return found

    def _update_cache(self, key: Key, cell: _Cell) -> None:
        bucket = self._buckets.get(key[:2])
        if bucket is None:
            return
        position = self._all.index(key[2])
        if position in bucket.unmeasured:
            del self._buckets[key[:2]]
            return
        level, sigma = _level_of(cell)
        bucket.factors[position], bucket.sigmas[position] = math.exp(level), sigma

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
        self._buckets.clear()
        self._base_batch = 0
        self._next_fit = max(self._count + 1, min(2 * self._count, self._count + _REFIT_EVERY))


def _level_of(cell: _Cell) -> tuple[float, float]:
    """Log correction of a measured cell and its uncertainty."""
    young = 0.02 if cell.samples < _HOLD_BACK else 0.0
    return cell.level, cell.spread / math.sqrt(max(cell.samples, 1.0)) + young


def _key(batch: float, kv_tokens: float, draft_length: int) -> Key:
    """Half-octaves of batch, octaves of context per request."""
    per_request = kv_tokens / batch if batch > 0 else 0.0
    return round(2.0 * math.log2(max(batch, 1.0))), round(math.log2(per_request + 64.0)), draft_length
