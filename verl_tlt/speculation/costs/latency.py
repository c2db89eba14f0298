"""The model of step costs: seconds of an engine step by batch, KV tokens and draft length, learned online.

Three factors:

* a fitted roofline (`roofline.py`), which extrapolates to batches and draft lengths that were not measured;
* a correction per cell (half-octave of batch x octave of context per request x K, `Cell`), because real kernels
  and CUDA graphs do not follow rooflines; a cell without a measurement takes the average of its neighbours;
* the machine's pace, one factor for all cells: a busy or throttled machine slows every draft length alike.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verl_tlt.speculation.costs.roofline import Roofline
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.types import OFF

_PACE_DRIFT = 2e-5
"""Variance that the log of the pace gains per step: 4.5 % in a hundred steps."""
_PACE_RETURN = 1e-3
"""Share of the log of the pace that is dropped per step, so that a lasting change is learned by the cells in use and
does not spoil the others."""
_REFIT_EVERY = 1024
"""Samples between fits, after a start in which the interval doubles from 1."""
_ANCHOR_UNTIL = 16
"""Samples during which the fit's usual coefficients are still set anew."""
_MEMORY = 96.0
"""Samples after which a cell's older samples count 1/e."""
_SEED_SAMPLES = 16
"""Samples that a point of a stored table counts as, at most; and that a cell must have to be stored beside a
calibration. Fewer are of one moment and have the error that the pace had then; a calibration's can be compared."""
_GUESS = 0.10
"""Relative uncertainty of a point interpolated between measured draft lengths."""
_NEAR, _FAR = 0.02, 0.10
"""Relative uncertainty of a cell without measurements: next to a measured one, and with none within `_REACH`."""
_REACH = 9.0
"""Squared distance, by `_APART`, beyond which neighbours say nothing."""
_APART = (1.0, 0.06, 2.0)
"""Weights of the squared distance between cells, in half-octaves of batch, octaves of context and draft lengths."""
_SHARED = 0.5
"""Weight of a deviation from the calibration that another draft length showed at a load, 1 being that of the same."""
_DOUBT = 1.0
"""Samples that count for no deviation at all."""
_TRUST = 3.0
"""Samples of its own that outweigh by half what other cells say of a cell."""
_TELLING = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Samples of a cell after which what is believed of the others about its load is computed anew."""
_FIRST = 3
"""First samples, whose median is compared with what the neighbours suggest."""
_CLIP = 2.5
"""Huber's threshold in standard deviations: a stall counts as no more than this."""
_COARSE = 0.01
"""Least uncertainty of a cell: the roofline is not exact across its width."""
_FAR_OFF = 0.4
"""Log ratio (or `2 * _CLIP` jitters) by which first samples may differ from each other."""
_PLAUSIBLE = 0.12
"""Log ratio (or `_CLIP` jitters) by which the median of the first samples may differ from the neighbours."""

_Key = tuple[int, int, int]


class _Bucket(NamedTuple):
    """The cells of one (batch, context), by position in `LatencyModel.lengths`."""

    factors: list[float]  # corrections of the roofline
    sigmas: list[float]  # their relative uncertainty
    moved: list[float]  # how far the corrections measured about here are off what was expected, logs


class LatencyModel:
    """T(batch, kv_tokens, K) in seconds for OFF and every draft length, which ascend; `table` is where it starts."""

    def __init__(self, lengths: Sequence[int], *, table: LatencyTable | None = None, active_share: float = 1.0) -> None:
        self.lengths = (OFF, *lengths)
        self._shape = Roofline(active_share)
        self._cells: dict[_Key, Cell] = {}
        self._pace = 0.0
        self._pace_variance = 0.0
        self.jitter = 0.05
        """Relative noise of a single step."""
        self._largest: dict[int, int] = {}
        self._seeded = False
        self._count = 0
        self._next_fit = 1
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        if table is not None:
            self.seed(table)

    def seed(self, table: LatencyTable) -> None:
        """Start from a stored table, until measurements outweigh it; a run's own figures are off its calibration's."""
        calibrated = [p for p in table.points if p.calibrated]
        for points, reference in ((calibrated, True), ([p for p in table.points if not p.calibrated], not calibrated)):
            for p in points:
                self._seed_point(p, reference)
            if points:
                self._refit(iterations=30)

    def _seed_point(self, p: LatencyPoint, reference: bool) -> None:
        """Start a cell from one point; `reference`: it is what was to be expected there."""
        if not self._shape.ready:
            self._shape.start(p.batch, p.kv_tokens, p.seconds)
        key = _key(p.batch, p.kv_tokens, p.draft_length)
        self._largest[p.draft_length] = max(self._largest.get(p.draft_length, 0), p.batch)
        level = math.log(p.seconds / self._shape.seconds(p.batch, p.kv_tokens, p.draft_length))
        cell = self._cells.get(key)
        if p.samples < 1:
            if cell is None:
                cell = self._cells[key] = Cell(p.draft_length, level, _GUESS, self.jitter)
                cell.place(p.batch, p.kv_tokens)
                cell.expect_level()
            return
        if cell is None:
            cell = self._cells[key] = Cell(p.draft_length, 0.0, math.inf, self.jitter)
        self._seeded = True
        for _ in range(min(p.samples, _SEED_SAMPLES)):
            cell.learn(level, self._pace, 0.0)
            cell.place(p.batch, p.kv_tokens)
        if reference:
            cell.expect_level()

    def observe(self, batch: int, kv_tokens: int, draft_length: int, seconds: float) -> None:
        """Learn from one clean step that verified `draft_length` and drafted as many again."""
        if not 0.0 < seconds < math.inf or batch <= 0 or draft_length not in self.lengths:
            return
        if not self._shape.ready:
            self._shape.start(batch, kv_tokens, seconds)
        key = _key(batch, kv_tokens, draft_length)
        cell = self._cells.get(key)
        if cell is None:
            expected, moved, sigma = self._borrowed(*key[:2], (draft_length,))[0]
            cell = self._cells[key] = Cell(draft_length, expected + moved, sigma, self.jitter)
            cell.expected = expected
        self._largest[draft_length] = max(self._largest.get(draft_length, 0), batch)
        log_ratio = math.log(seconds / self._shape.seconds(batch, kv_tokens, draft_length))
        # A sample is divided between its cell and the machine's pace, by the uncertainty of each.
        self._pace *= 1.0 - _PACE_RETURN
        self._pace_variance += _PACE_DRIFT
        expected = cell.spread**2 + self._pace_variance + cell.variance
        self._pace += cell.learn(log_ratio, self._pace, self._pace_variance)
        self._pace_variance -= self._pace_variance**2 / expected
        self.jitter += 0.02 * (cell.spread - self.jitter)
        cell.place(batch, kv_tokens)
        if not self._seeded:
            cell.expect_level()
        elif cell.own_samples in _TELLING:
            self._buckets.pop(key[:2], None)
        if bucket := self._buckets.get(key[:2]):
            position = self.lengths.index(draft_length)
            bucket.factors[position] = math.exp(cell.believed(bucket.moved[position]))
            bucket.sigmas[position] = cell.sigma()
        self._count += 1
        if self._count >= self._next_fit:
            self._refit()

    def seconds(self, batch: int, kv_tokens: int, draft_length: int) -> float:
        """Expected seconds of one steady step at this load; 0.0 while nothing was measured."""
        return self.predict(batch, kv_tokens)[self.lengths.index(draft_length)]

    def predict(self, batch: int, kv_tokens: int) -> list[float]:
        """Seconds for OFF and then every draft length; zeros while nothing was measured."""
        if not self._cells:
            return [0.0] * len(self.lengths)
        pace, factors = math.exp(self._pace), self._bucket(batch, kv_tokens).factors
        shape = self._shape.by_length(batch, kv_tokens, self.lengths)
        return [pace * factor * seconds for factor, seconds in zip(factors, shape, strict=True)]

    def uncertainty(self, batch: int, kv_tokens: int) -> list[float]:
        """Relative standard deviation of `predict`, length by length."""
        return list(self._bucket(batch, kv_tokens).sigmas) if self._cells else [1.0] * len(self.lengths)

    def largest_batch(self, draft_length: int) -> int:
        """Largest batch at which a draft length was measured; 0 if never."""
        return self._largest.get(draft_length, 0)

    def to_table(self, calibration: LatencyTable | None = None) -> LatencyTable:
        """The measured cells, a point each, for the store; a calibration is kept as it is, and completed."""
        points = list(calibration.points) if calibration else []
        # The pace is the machine's at the moment; a calibration is what it was compared with.
        pace, least = (0.0, _SEED_SAMPLES) if points else (self._pace, 0)
        known = {_key(p.batch, p.kv_tokens, p.draft_length) for p in points}
        for key, cell in self._cells.items():
            if key in known or cell.samples < least:
                continue
            shape = self._shape.seconds(cell.batch, cell.kv_tokens, cell.draft_length)
            seconds = shape * math.exp(cell.level + pace)
            load = round(cell.batch), round(cell.kv_tokens)
            points.append(LatencyPoint(*load, cell.draft_length, seconds, round(cell.samples)))
        return LatencyTable(tuple(points))

    def _bucket(self, batch: int, kv_tokens: int) -> _Bucket:
        """The bucket of a load, made on first use after a refit and kept up to date by `observe`."""
        load = _key(batch, kv_tokens, 0)[:2]
        bucket = self._buckets.get(load)
        if bucket is None:
            bucket = self._buckets[load] = _Bucket([], [], [])
            for k, (expected, moved, sigma) in zip(self.lengths, self._borrowed(*load, self.lengths), strict=True):
                cell = self._cells.get((*load, k))
                bucket.factors.append(math.exp(cell.believed(moved) if cell else expected + moved))
                bucket.sigmas.append(cell.sigma() if cell else sigma)
                bucket.moved.append(moved)
        return bucket

    def _borrowed(self, batch: int, context: int, lengths: Sequence[int]) -> list[tuple[float, float, float]]:
        """For draft lengths at a load: expected correction (log), how far it seems to be off, and its uncertainty.

        What a run measures at about a load is off for all draft lengths nearly alike: it has other contexts and
        requests than a calibration, and a busier machine.
        """
        if not self._cells:
            return [(0.0, 0.0, math.inf)] * len(lengths)
        cells = list(self._cells.values())
        keys = np.array(list(self._cells), dtype=np.float64).T  # [3, cells]
        off = np.array([cell.level - cell.expected for cell in cells])  # [cells]
        samples, own = np.array([[c.samples, min(c.own_samples, 8.0)] for c in cells]).T  # [cells] each
        here = _APART[0] * (keys[0] - batch) ** 2 + _APART[1] * (keys[1] - context) ** 2  # [cells]
        apart = _APART[2] * (keys[2] - np.array(lengths, dtype=np.float64)[:, None]) ** 2  # [lengths, cells]
        votes = np.exp(-here) * own * (_SHARED + (1.0 - _SHARED) * np.exp(-apart))
        moved = (votes @ off) / (votes.sum(axis=1) + _DOUBT)
        nearest = np.minimum(np.where(samples > 0, here + apart, _REACH).min(axis=1), _REACH)
        sigma = _NEAR + (_FAR - _NEAR) * np.sqrt(nearest / _REACH)
        expected = self._expected([(batch, context, k) for k in lengths])
        return list(zip(expected, moved.tolist(), sigma.tolist(), strict=True))

    def _expected(self, keys: Sequence[_Key]) -> list[float]:
        """Corrections (log) that the reference cells suggest for cells: their average, by distance."""
        references = {key: cell for key, cell in self._cells.items() if cell.reference}
        if not references:
            return [0.0] * len(keys)
        apart = (np.array(keys, dtype=np.float64)[:, None] - np.array(list(references))) ** 2 @ np.array(_APART)
        votes = np.exp(-apart) * [min(cell.samples, 8.0) for cell in references.values()]  # [keys, references]
        average = votes @ [cell.expected for cell in references.values()] / (votes.sum(axis=1) + 0.5)
        return [float(one) for one in average]

    def _refit(self, iterations: int = 3) -> None:
        """Fit the roofline to what the cells say, then restate the cells relative to the new roofline."""
        cells = list(self._cells.values())
        rows = [(c.batch, c.kv_tokens, c.draft_length) for c in cells]
        believed = [self._shape.seconds(*row) * math.exp(c.level) for row, c in zip(rows, cells, strict=True)]
        if self._count <= _ANCHOR_UNTIL:
            # The very first step may have compiled: start from the best-known cell, one without drafts if possible.
            anchor = max(cells, key=lambda c: (c.draft_length <= 0, c.samples))
            self._shape.start(anchor.batch, anchor.kv_tokens, believed[cells.index(anchor)])
        # A single sample may be a stall: it hardly counts.
        self._shape.fit(rows, believed, [min(c.samples, 16.0) if c.samples > 1 else 0.25 for c in cells], iterations)
        for row, seconds, cell in zip(rows, believed, cells, strict=True):
            cell.shift(math.log(seconds / max(self._shape.seconds(*row), 1e-12)) - cell.level)
        later = [key for key, cell in self._cells.items() if not cell.reference]
        for key, expected in zip(later, self._expected(later) if later else (), strict=True):
            self._cells[key].expected = expected
        self._buckets.clear()
        self._next_fit = max(self._count + 1, min(2 * self._count, self._count + _REFIT_EVERY))


def _key(batch: float, kv_tokens: float, draft_length: int) -> _Key:
    """Half-octaves of batch, octaves of context per request, draft length."""
    per_request = kv_tokens / batch if batch > 0 else 0.0
    return round(2.0 * math.log2(max(batch, 1.0))), round(math.log2(per_request + 64.0)), draft_length


class Cell:
    """Log correction of the roofline at one load and draft length: a scalar Kalman filter, robust against stalls.

    `prior` is what neighbours suggest (`prior_sigma` infinite without any), `jitter` the relative noise of one step so
    far.
    """

    def __init__(self, draft_length: int, prior: float, prior_sigma: float, jitter: float) -> None:
        self.draft_length = draft_length
        self.level = self.prior = prior
        self.variance = self.prior_variance = prior_sigma**2
        self.spread = jitter
        self.samples = self.own_samples = 0.0
        self.expected = prior
        self.reference = False
        """What is expected of cells without measurements comes from this one: it was calibrated, or nothing was."""
        self.first: list[float] = []
        self.batch, self.kv_tokens = 0.0, 0.0

    def learn(self, log_ratio: float, pace: float, pace_variance: float) -> float:
        """Take in log(measured / roofline); returns what to add to `pace` (a log)."""
        self.samples, self.own_samples = min(self.samples + 1.0, _MEMORY), self.own_samples + 1.0
        if len(self.first) < _FIRST:
            self.first.append(log_ratio - pace)
            self._begin()
            return 0.0
        surprise = log_ratio - pace - self.level
        expected = self.spread**2 + pace_variance + self.variance
        clip = _CLIP * math.sqrt(expected)
        clipped = max(-clip, min(clip, surprise))
        # 1.3 keeps the scale estimate unbiased under the clip for Gaussian noise; stalls move it little.
        self.spread = max(self.spread + 0.05 * (1.3 * min(abs(surprise), 2.0 * clip) - self.spread), 0.002)
        self.level += self.variance / expected * clipped
        self.variance = max(self.variance - self.variance**2 / expected, self.spread**2 / _MEMORY, _COARSE**2)
        return pace_variance / expected * clipped

    def expect_level(self) -> None:
        """Take what is known for what was to be expected: no other cell is off for it."""
        self.reference, self.expected, self.own_samples = True, self.level, 0.0

    def believed(self, moved: float) -> float:
        """The level, in which few samples of its own count for less than how far other cells are off (`moved`)."""
        return self.level + _TRUST / (_TRUST + self.own_samples) * (self.expected + moved - self.level)

    def sigma(self) -> float:
        return math.sqrt(self.variance) + (0.02 if len(self.first) < _FIRST else 0.0)

    def place(self, batch: float, kv_tokens: float) -> None:
        """Move the cell's centre towards a sample's load."""
        share = 1.0 / max(1.0, self.samples)
        self.batch += share * (batch - self.batch)
        self.kv_tokens += share * (kv_tokens - self.kv_tokens)

    def shift(self, offset: float) -> None:
        """Restate everything relative to a roofline that changed by `-offset` here."""
        self.level += offset
        self.prior += offset
        self.expected += offset
        self.first = [x + offset for x in self.first]

    def _begin(self) -> None:
        """Level from one to three samples: their lower median, since a first use may stall but is never too fast; or
        the least where they do not agree. One very slow sample alone changes nothing.
        """
        count, ordered = len(self.first), sorted(self.first)
        agree = ordered[-1] - ordered[0] <= max(_FAR_OFF, 2.0 * _CLIP * self.spread)
        median, noise = ordered[(count - 1) // 2 if agree else 0], self.spread**2 / (count if agree else 1)
        plausible = max(_PLAUSIBLE, _CLIP * self.spread)
        if not math.isfinite(self.prior_variance):
            self.level, self.variance = median, noise
        elif abs(median - self.prior) < plausible:
            trust = self.prior_variance / (self.prior_variance + noise)
            self.level, self.variance = self.prior + trust * (median - self.prior), trust * noise
        elif count == 1 and median > self.prior:  # a stall, most likely: the next one will tell
            self.level, self.variance = self.prior, max(self.prior_variance, noise)
        else:
            self.level, self.variance = median, noise
