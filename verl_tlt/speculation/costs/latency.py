"""Seconds an engine step takes, T(batch, KV tokens, K), learned online from clean steps.

Three layers, from coarse to fine:

* a fitted roofline (`roofline.py`) carries what a handful of steps teach to batches and draft lengths never seen;
* one correction per cell (half-octave of batch x octave of context per request x K, `cells.py`), because real kernels
  and CUDA graphs do not follow rooflines;
* one pace for all, because a busy or throttled machine slows every draft length alike.

A cell that was never measured borrows from its neighbours and is kept between the draft lengths measured there below
and above it: latency rises with K, by what the fit says at least, unless a measurement says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from verl_tlt.speculation.costs.cells import Cell
from verl_tlt.speculation.costs.roofline import Roofline
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.types import OFF

_PACE_DRIFT = 2e-5
"""Variance that the log of the machine's pace gains per step: 4.5 % in a hundred steps."""
_PACE_RETURN = 1e-3
"""Share of the pace that is forgotten per step: what lasts is learned by the cells in use, and a pace that took over
their errors would spoil those that are not."""
_REFIT_EVERY = 1024
"""Samples between fits, after a start in which the interval doubles from 1."""
_ANCHOR_UNTIL = 16
"""Samples during which the usual coefficients are still set anew."""
_SEED_SAMPLES = 8
"""Samples a point of a stored table is worth at most."""
_GUESS = 0.10
"""Relative uncertainty of a point between measured draft lengths."""
_NEAR, _FAR = 0.02, 0.10
"""Relative uncertainty of a cell known from its neighbours: beside one, and with none in reach."""
_REACH = 9.0
_APART = (1.0, 0.06, 2.0)
"""How unlike cells become: by half-octaves of batch, octaves of context and draft lengths between them, squared."""

Key = tuple[int, int, int]
Floats = npt.NDArray[np.float64]


class _Bucket(NamedTuple):
    """What one (batch, context) bucket says about OFF and every arm, by position."""

    factors: list[float]
    """Multiply the roofline."""
    sigmas: list[float]
    """Relative uncertainty."""
    unmeasured: list[int]
    """Positions that borrow from neighbours, ascending."""
    floors: dict[int, tuple[int, float]]
    """For each of those that has one: position of a shorter draft measured here, and how much more than by the fit this
    one costs beside it (`_beside`), at most 1."""
    ceilings: dict[int, tuple[int, float]]
    """The same of a longer draft measured here, without a bound."""
    unknown: set[int]
    """Those measured at no context of this batch."""


class _Map:
    """Where all cells lie and what they say, as columns that grow by doubling, for quick looks at neighbours."""

    def __init__(self) -> None:
        self._data = np.zeros((5, 64))  # batch bucket, context bucket, K, level, votes
        self._rows: dict[int, int] = {}

    def append(self, key: Key, cell: Cell) -> None:
        """Add a cell; its level and votes are 0 until `update`."""
        row = len(self._rows)
        if row == self._data.shape[1]:
            self._data = np.concatenate((self._data, np.zeros_like(self._data)), axis=1)
        self._data[:3, row] = key
        self._rows[id(cell)] = row

    def update(self, cell: Cell) -> None:
        """Take over a cell's level."""
        row = self._rows[id(cell)]
        self._data[3, row], self._data[4, row] = cell.level, min(cell.samples, 8.0)

    def columns(self) -> tuple[Floats, Floats, Floats]:
        """Keys [3, cells], levels [cells] and votes [cells]."""
        used = self._data[:, : len(self._rows)]
        return used[:3], used[3], used[4]


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
        self._cells: dict[Key, Cell] = {}
        self._map = _Map()
        self._pace = 0.0
        self._pace_variance = 0.0
        self._jitter = 0.05
        self._contexts: dict[tuple[int, int], set[int]] = {}  # by bucket of batch and draft length: measured there
        self._span: dict[int, tuple[int, int]] = {}
        self._count = 0
        self._next_fit = 1
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._parts_batch = -1
        self._last_parts: list[tuple[float, float]] = []
        if table is not None:
            self.seed(table)

    def seed(self, table: LatencyTable) -> None:
        """Believe a stored table until measurements say otherwise."""
        for p in table.points:
            if not self._shape.ready:
                self._shape.start(p.batch, p.kv_tokens, p.seconds)
            key = _key(p.batch, p.kv_tokens, p.draft_length)
            self._note_batch(p.draft_length, p.batch)
            level = math.log(p.seconds / self._shape.seconds(p.batch, p.kv_tokens, p.draft_length))
            known = self._cells.get(key)
            if p.samples < 1:
                if known is None:
                    self._add(key, Cell(p.draft_length, level, _GUESS, self._jitter)).place(p.batch, p.kv_tokens)
                continue
            cell = known or self._add(key, Cell(p.draft_length, 0.0, math.inf, self._jitter))
            self._contexts.setdefault(key[::2], set()).add(key[1])
            for _ in range(min(p.samples, _SEED_SAMPLES)):
                cell.learn(level, self._pace, 0.0, self._memory)
                cell.place(p.batch, p.kv_tokens)
        if table.points:
            self._refit(iterations=30)

    def observe(self, batch: int, kv_tokens: int, draft_length: int, seconds: float) -> None:
        """Learn from one clean step that verified `draft_length` and drafted as many again."""
        if not 0.0 < seconds < math.inf or batch <= 0 or draft_length not in self._all:
            return
        if not self._shape.ready:
            self._shape.start(batch, kv_tokens, seconds)
        key = _key(batch, kv_tokens, draft_length)
        cell = self._cells.get(key)
        if cell is None:
            prior, sigma = self._borrowed(*key[:2], (draft_length,))[0]
            cell = self._add(key, Cell(draft_length, prior, sigma, self._jitter))
        self._note_batch(draft_length, batch)
        self._contexts.setdefault(key[::2], set()).add(key[1])
        self._learn(cell, math.log(seconds / self._shape.seconds(batch, kv_tokens, draft_length)))
        cell.place(batch, kv_tokens)
        self._map.update(cell)
        self._update_bucket(key, cell)
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
        pace, memory, join = math.exp(self._pace), self._shape.memory(kv_tokens), self._shape.join
        bucket = self._bucket(batch, kv_tokens)
        shape = [join(memory, *part) for part in self._parts(batch)]
        found = [seconds * factor * pace for seconds, factor in zip(shape, bucket.factors, strict=True)]
        for arm in bucket.unmeasured:
            below, least = bucket.floors.get(arm, (0, 0.0))
            # What makes that draft length slow here is not known where this one was measured.
            found[arm] = max(found[arm], least * found[below] * shape[arm] / shape[below])
            above, beside = bucket.ceilings.get(arm, (arm, 1.0))
            found[arm] = min(found[arm], found[above] * max(1.0, beside * shape[arm] / shape[above]))
            if arm > 0 and arm in bucket.unknown:
                found[arm] = max(found[arm], found[arm - 1])
        return found

    def uncertainty(self, batch: int, kv_tokens: int) -> list[float]:
        """Relative standard deviation of `predict`, arm by arm."""
        return list(self._bucket(batch, kv_tokens).sigmas) if self._cells else [1.0] * len(self._all)

    def optimistic(self, batch: int, kv_tokens: int) -> list[float]:
        """`predict`, with draft lengths measured at larger batches only taken to cost in proportion to the batch.

        What a draft cost extra over K=0 at a large batch may have been its tokens, which shrink with the batch, or the
        drafter's passes, which do not; until it is measured nearer, nobody knows.
        """
        found = self.predict(batch, kv_tokens)
        zero = found[1]
        for arm in self._bucket(batch, kv_tokens).unmeasured if self._cells else ():
            nearest = self._span.get(self._all[arm], (0, 0))[0]
            if nearest > batch and found[arm] > zero:
                found[arm] = zero + (found[arm] - zero) * batch / nearest
        return found

    def largest_batch(self, draft_length: int) -> int:
        """Largest batch at which a draft length was measured; 0 if never."""
        return self._span.get(draft_length, (0, 0))[1]

    @property
    def jitter(self) -> float:
        """Relative noise of a single step."""
        return self._jitter

    def to_table(self, calibration: LatencyTable | None = None) -> LatencyTable:
        """Every measured cell as one point, for the store.

        Args:
            calibration: kept as it is, and completed by cells that it does not reach. What a run learned about a draft
                length it used for hours, on a machine that was busy then, says nothing against one it hardly used.
        """
        points = list(calibration.points) if calibration else []
        # The pace is the machine's at the moment; a calibration is what it was compared with.
        known, pace = {_key(p.batch, p.kv_tokens, p.draft_length) for p in points}, 0.0 if points else self._pace
        for key, cell in self._cells.items():
            if key in known:
                continue
            shape = self._shape.seconds(cell.batch, cell.kv_tokens, cell.draft_length)
            seconds = shape * math.exp(cell.level + pace)
            where = round(cell.batch), round(cell.kv_tokens)
            points.append(LatencyPoint(*where, cell.draft_length, seconds, round(cell.samples)))
        return LatencyTable(tuple(points))

    def _add(self, key: Key, cell: Cell) -> Cell:
        self._cells[key] = cell
        self._map.append(key, cell)
        return cell

    def _note_batch(self, draft_length: int, batch: int) -> None:
        smallest, largest = self._span.get(draft_length, (batch, batch))
        self._span[draft_length] = min(smallest, batch), max(largest, batch)

    def _learn(self, cell: Cell, log_ratio: float) -> None:
        """Divide a sample between its cell and the machine's pace."""
        self._pace *= 1.0 - _PACE_RETURN
        self._pace_variance += _PACE_DRIFT
        expected = cell.spread**2 + self._pace_variance + cell.variance
        self._pace += cell.learn(log_ratio, self._pace, self._pace_variance, self._memory)
        self._pace_variance -= self._pace_variance**2 / expected
        self._jitter += 0.02 * (cell.spread - self._jitter)

    def _parts(self, batch: int) -> list[tuple[float, float]]:
        """Roofline terms of OFF and every arm; the batch changes rarely, so the last answer is kept."""
        if batch != self._parts_batch:
            self._parts_batch, self._last_parts = batch, [self._shape.part(batch, k) for k in self._all]
        return self._last_parts

    def _bucket(self, batch: int, kv_tokens: int) -> _Bucket:
        """The bucket of a load, put together on first use after a refit or a first measurement."""
        where = _key(batch, kv_tokens, 0)[:2]
        found = self._buckets.get(where)
        if found is None:
            found = self._buckets[where] = _Bucket([], [], [], {}, {}, set())
            borrowed = self._borrowed(*where, self._all)
            for position, k in enumerate(self._all):
                cell = self._cells.get((*where, k))
                if cell is None:
                    found.unmeasured.append(position)
                    if (where[0], k) not in self._contexts:
                        found.unknown.add(position)
                level, sigma = (cell.level, cell.sigma()) if cell else borrowed[position]
                found.factors.append(math.exp(level))
                found.sigmas.append(sigma)
            measured = [p for p in range(len(self._all)) if p not in found.unmeasured]
            for position in found.unmeasured:
                shorter, longer = [p for p in reversed(measured) if p < position], [p for p in measured if p > position]
                if shorter:
                    below, ratio = self._beside(where, position, shorter)
                    found.floors[position] = below, min(1.0, ratio)
                if longer:
                    found.ceilings[position] = self._beside(where, position, longer)
        return found

    def _beside(self, where: tuple[int, int], position: int, nearest_first: Sequence[int]) -> tuple[int, float]:
        """A draft length measured here, and how much more than by the fit another one costs beside it.

        Args:
            where: bucket of batch and of context.
            position: of the draft length that was not measured here.
            nearest_first: positions of those that were.

        Returns:
            the nearest beside which it was measured at another context; else the nearest, and 1.
        """
        batch, context = where
        own = self._contexts.get((batch, self._all[position]), set())
        for other in nearest_first:
            if common := own & self._contexts.get((batch, self._all[other]), set()):
                at = min(common, key=lambda c: (abs(c - context), c))
                mine, theirs = (self._cells[batch, at, self._all[p]].level for p in (position, other))
                return other, math.exp(mine - theirs)
        return nearest_first[0], 1.0

    def _update_bucket(self, key: Key, cell: Cell) -> None:
        """Carry one cell's new level into its bucket; a first measurement puts the bucket together anew."""
        bucket = self._buckets.get(key[:2])
        if bucket is None:
            return
        position = self._all.index(key[2])
        if position in bucket.unmeasured:
            del self._buckets[key[:2]]
        else:
            bucket.factors[position], bucket.sigmas[position] = math.exp(cell.level), cell.sigma()

    def _borrowed(self, batch: int, context: int, arms: Sequence[int]) -> list[tuple[float, float]]:
        """Corrections of unmeasured cells and their uncertainties: the neighbours' average, by distance."""
        if not self._cells:
            return [(0.0, math.inf)] * len(arms)
        keys, levels, samples = self._map.columns()
        here = _APART[0] * (keys[0] - batch) ** 2 + _APART[1] * (keys[1] - context) ** 2  # [cells]
        distance = here + _APART[2] * (keys[2] - np.asarray(arms, dtype=np.float64)[:, None]) ** 2  # [arms, cells]
        votes = np.exp(-distance) * samples
        level = (votes @ levels) / (votes.sum(axis=1) + 0.5)
        nearest = np.minimum(np.where(samples > 0, distance, _REACH).min(axis=1), _REACH)
        sigma = _NEAR + (_FAR - _NEAR) * np.sqrt(nearest / _REACH)
        return list(zip(level.tolist(), sigma.tolist(), strict=True))

    def _refit(self, iterations: int = 3) -> None:
        """Fit the shape to what the cells believe, then restate the cells relative to the new shape."""
        cells = list(self._cells.values())
        rows = [(c.batch, c.kv_tokens, c.draft_length) for c in cells]
        believed = [self._shape.seconds(*row) * math.exp(c.level) for row, c in zip(rows, cells, strict=True)]
        if self._count <= _ANCHOR_UNTIL:
            # The very first step may have compiled: what is usual is told by the best-known cell, without draft.
            anchor = max(cells, key=lambda c: (c.draft_length <= 0, c.samples))
            self._shape.start(anchor.batch, anchor.kv_tokens, believed[cells.index(anchor)])
        # A single sample may be a stall: it hardly counts.
        self._shape.fit(rows, believed, [min(c.samples, 16.0) if c.samples > 1 else 0.25 for c in cells], iterations)
        for row, seconds, cell in zip(rows, believed, cells, strict=True):
            cell.shift(math.log(seconds / max(self._shape.seconds(*row), 1e-12)) - cell.level)
            self._map.update(cell)
        self._buckets.clear()
        self._parts_batch = -1
        self._next_fit = max(self._count + 1, min(2 * self._count, self._count + _REFIT_EVERY))


def _key(batch: float, kv_tokens: float, draft_length: int) -> Key:
    """Half-octaves of batch, octaves of context per request."""
    per_request = kv_tokens / batch if batch > 0 else 0.0
    return round(2.0 * math.log2(max(batch, 1.0))), round(math.log2(per_request + 64.0)), draft_length
