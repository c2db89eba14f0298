"""The seconds by which a rollout ended earlier than it would have without drafts.

For every replica r, over the load intervals i of its rollout (`LoadInterval`):

    late(r) = sum over i of plain_steps(i) * off_s(batch(i), context(i), busy(i)) - seconds(i)
    saved_s = max over r of (end(r) + late(r)) - max over r of end(r)

`off_s` is what a step without drafts takes at that load, by the calibration and by live steps without drafts, of
control rollouts above all. Prefills and pauses are taken to be what they were.

Where replicas share a machine's processors, a step is compared with steps beside as many busy replicas, and only steps
beside which nobody drafted or trained are the measure: without TLT nobody trains during the rollout.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from verl_tlt.messages.rollout import EngineStats, LoadInterval
from verl_tlt.speculation.costs.roofline import Roofline
from verl_tlt.speculation.costs.tables import CALIBRATED_SAMPLES, CONTEXT_TOKENS, interpolate
from verl_tlt.speculation.types import OFF

COVERED = 0.5
"""Share of the decoding time that must be comparable for a figure to be given."""
MEMORY_STEPS = 500.0
"""New steps at a load that halve the weight of those before them."""
UNMIXED = 0.1
"""Replicas that are busy, draft or train, on average over an interval, may differ by this from a whole number: else one
came or went, and the interval is of two kinds."""
REACH = 1.5
"""Batches are compared with one that was measured up to this factor away, where no calibration tells how costs grow."""
SHORT_CONTEXT = 256
"""Tokens of context per request up to which context hardly matters to the cost of a step. Longer contexts are compared
with the same octave or the next one on either side, by a `Roofline`: reading the KV cache may be most of a step."""
EARLY, SOON, RARELY = 2, 8, 256
"""Control rollouts at a run's beginning; rollouts before each of these, and before each later one."""

Times = Sequence[tuple[float, float]]
"""(start, end), unix seconds, in any order."""


class Savings(NamedTuple):
    """What a rollout gained by drafting; None: too little can be compared (`COVERED`)."""

    saved_s: float | None
    """Seconds by which the rollout ended earlier; 0: nothing was drafted. None also where a replica gave no figures."""
    gain: float | None
    """Share of the decoding time without drafts that was saved where the drafter ran and nobody trained beside it."""


class ControlRollouts:
    """Which replicas decode a rollout without drafts, as the measure of the others; none in most rollouts.

    Where they share a machine (`shared`) all of them do, else each in turn. With `every`
    (`tlt.speculation.control_every`) None a run has `EARLY` such rollouts and then rarely one, since everybody waits
    for a replica that does not draft. Where too little of a drafted rollout can be compared with them, the next comes
    sooner; each that does not change that doubles the wait. Otherwise one in so many steps from the second on, 0:
    never. Rollouts that are OFF serve as well.
    """

    def __init__(self, replicas: Sequence[str], every: int | None, shared: bool) -> None:
        self._replicas, self._every, self._shared = list(replicas), every, shared
        self._plain = self._since = 0  # rollouts without drafts; rollouts since the last of them
        self._later = RARELY  # rollouts before the next one, after the `EARLY`

    def chosen(self, step: int) -> list[str]:
        """Replicas that decode the rollout of `step` without drafts; asked only where drafting pays."""
        due = self._since >= (SOON if self._plain < EARLY else self._later)
        if self._every is not None:
            due = self._every > 0 and step % self._every == 2 % self._every
        turn = self._plain if self._every is None else step // max(self._every, 1)
        if not due:
            return []
        return self._replicas if self._shared else [self._replicas[turn % len(self._replicas)]]

    def ended(self, undrafted: Collection[str], trained: bool, compared: bool) -> None:
        """A rollout is over that some replicas decoded without drafts; `trained`: beside training of the drafter;
        `compared`: as much as `COVERED` of it could be.
        """
        plain = len(undrafted) == len(self._replicas) and not trained if self._shared else bool(undrafted)
        if plain:
            self._later = min(2 * self._later, RARELY)
        elif compared or self._later == RARELY:
            self._later = RARELY if compared else SOON
        self._plain, self._since = self._plain + plain, 0 if plain else self._since + 1


class _Row(NamedTuple):
    """A load interval and what else went on during it, as far as that matters to its seconds."""

    interval: LoadInterval
    busy: float  # replicas that decoded, on average, its own included
    drafting: float  # those of them that drafted
    training: float  # replicas that trained

    @property
    def undisturbed(self) -> bool:
        """Whether the replica decoded as it would have without TLT."""
        return self.interval.off and max(self.drafting, self.training) < UNMIXED


class SavingsAccount:
    """Learns what steps without drafts take, and says what each rollout saved; `shared` as in `ControlRollouts`."""

    def __init__(self, shared: bool, active_share: float = 1.0) -> None:
        self._shared, self._active_share = shared, active_share  # the latter as in `Roofline`
        self._calibrated: Sequence[tuple[int, float]] = ()
        # By busy replicas and context, then by batch: weighted sums (steps, seconds, batches, KV tokens), undrafted.
        self._live: dict[tuple[int, int], dict[int, tuple[float, ...]]] = {}
        self._shapes: dict[int, Roofline] = {}  # fitted to them, by busy replicas
        # The same as (batch, seconds as they would be at `CONTEXT_TOKENS`), ascending.
        self._points: dict[tuple[int, int], list[tuple[float, float]]] = {}

    def calibrated(self, off: Sequence[tuple[int, float]]) -> None:
        """Take note of a calibration: (batch, seconds of a step without drafts), ascending, of one busy replica."""
        self._calibrated = off

    def rollout(self, stats: Mapping[str, EngineStats], training: Times = ()) -> Savings:
        """What a rollout saved; its steps without drafts are learned from first, and those with drafts never."""
        rows = self._rows({name: s.load_intervals for name, s in stats.items() if s.load_intervals}, training)
        self._learn([row for of_replica in rows.values() for row in of_replica])
        if not any(row.interval.seconds for of_replica in rows.values() for row in of_replica):
            return Savings(None, None)
        if any(s.failure for s in stats.values()):  # it may have been the last
            return Savings(None, self._gain(rows))
        drafted = any(s.num_drafts for s in stats.values())
        return Savings(self._saved_s(rows) if drafted else 0.0, self._gain(rows))

    def off_seconds(self, batch: float, context: float = CONTEXT_TOKENS, busy: int = 1) -> float | None:
        """Seconds of a step without drafts at `context` tokens a request, with so many busy replicas; None: unknown."""
        own = _octave(context)
        estimates = (self._off_seconds_in(batch, octave, busy) for octave in (own, own - 1, own + 1))
        seconds = next((seconds for seconds in estimates if seconds is not None), None)
        return None if seconds is None else seconds * self._growth(batch, batch * context, busy)

    def _growth(self, batch: float, kv_tokens: float, busy: int) -> float:
        """How many times as long a step takes as at `CONTEXT_TOKENS` a request."""
        if (shape := self._shapes.get(busy)) is None:
            return 1.0
        return shape.seconds(batch, kv_tokens, OFF) / shape.seconds(batch, batch * CONTEXT_TOKENS, OFF)

    def _off_seconds_in(self, batch: float, octave: int, busy: int) -> float | None:
        points, calibrated = self._points.get((busy, octave)), self._calibrated if octave == 0 else ()
        if not points:
            return interpolate(calibrated, batch) if calibrated and busy == 1 else None
        if points[0][0] <= batch <= points[-1][0]:
            return interpolate(points, batch)
        nearest, nearest_s = points[0] if batch < points[0][0] else points[-1]
        if calibrated:
            return nearest_s * interpolate(calibrated, batch) / interpolate(calibrated, nearest)
        return nearest_s if max(nearest / batch, batch / nearest) <= REACH else None

    def _late(self, rows: Iterable[_Row]) -> tuple[float, float]:
        """(Seconds by which these rows would have taken longer without drafts, their own), as far as that is known."""
        late_s = compared_s = 0.0
        for interval, busy, *_ in (row for row in rows if row.interval.seconds > 0 and not row.undisturbed):
            off_s = self.off_seconds(interval.batch, interval.context, round(busy))
            if off_s is not None:
                late_s += interval.plain_steps * off_s - interval.seconds
                compared_s += interval.seconds
        return late_s, compared_s

    def _learn(self, rows: Sequence[_Row]) -> None:
        """Take over the steps of undisturbed intervals."""
        for row in (row for row in rows if row.undisturbed):
            interval, busy, steps = row.interval, row.busy, row.interval.plain_steps
            if min(steps, interval.seconds) <= 0 or abs(busy - round(busy)) >= UNMIXED:
                continue
            by_batch = self._live.setdefault((round(busy), _octave(interval.context)), {})
            bucket, kept = round(4 * math.log2(interval.batch)), MEMORY_STEPS / (MEMORY_STEPS + steps)
            batches = steps * interval.batch
            new = (steps, interval.seconds, batches, batches * interval.context)
            old = by_batch.get(bucket, (0.0,) * len(new))
            by_batch[bucket] = tuple(kept * a + b for a, b in zip(old, new, strict=True))
        loads = sorted(
            (*load, batches / n, kv_tokens / n, seconds / n)
            for load, by_batch in self._live.items()
            for n, seconds, batches, kv_tokens in by_batch.values()
        )
        for busy in {busy for busy, *_ in loads}:
            known = [row[2:] for row in loads if row[0] == busy]
            known += [(batch, batch * CONTEXT_TOKENS, seconds) for batch, seconds in self._calibrated if busy == 1]
            shape = self._shapes[busy] = Roofline(self._active_share)
            shape.start(*known[0])
            at, took = [(batch, kv_tokens, OFF) for batch, kv_tokens, _ in known], [seconds for *_, seconds in known]
            shape.fit(at, took, [CALIBRATED_SAMPLES] * len(known), iterations=30)
        self._points = {}
        for busy, octave, batch, kv_tokens, seconds in loads:
            point = batch, seconds / self._growth(batch, kv_tokens, busy)
            self._points.setdefault((busy, octave), []).append(point)

    def _saved_s(self, rows: Mapping[str, Sequence[_Row]]) -> float | None:
        late = [self._late(of_replica) for of_replica in rows.values()]
        all_rows = [row for of_replica in rows.values() for row in of_replica]
        compared_s = sum(seconds for _, seconds in late) + _seconds(row for row in all_rows if row.undisturbed)
        if compared_s < COVERED * _seconds(all_rows):
            return None
        ends = [of_replica[-1].interval.end for of_replica in rows.values()]
        return max(end + late_s for end, (late_s, _) in zip(ends, late, strict=True)) - max(ends)

    def _gain(self, rows: Mapping[str, Sequence[_Row]]) -> float | None:
        drafted = [row for of_replica in rows.values() for row in of_replica if not row.interval.off]
        late_s, compared_s = self._late(row for row in drafted if row.training < UNMIXED)
        off_s = late_s + compared_s
        if not off_s or compared_s < COVERED * _seconds(drafted):
            return None
        return late_s / off_s

    def _rows(self, rollout: Mapping[str, Sequence[LoadInterval]], training: Times) -> dict[str, list[_Row]]:
        """Every interval of every replica with what went on beside it."""
        if not self._shared:
            return {name: [_Row(i, 1.0, 0.0, 0.0) for i in intervals] for name, intervals in rollout.items()}
        intervals = [interval for of_replica in rollout.values() for interval in of_replica]
        busy = _Count([(i.start, i.end) for i in intervals])
        drafting = _Count([(i.start, i.end) for i in intervals if not i.off])
        trained = _Count(training)

        def row(i: LoadInterval) -> _Row:
            return _Row(i, max(1.0, busy.average(i)), drafting.average(i), trained.average(i))

        return {name: [row(i) for i in of_replica] for name, of_replica in rollout.items()}


def _seconds(rows: Iterable[_Row]) -> float:
    return sum(row.interval.seconds for row in rows)


def _octave(context: float) -> int:
    """0 of a short context, one more for each doubling."""
    return max(0, math.ceil(math.log2(max(context, 1.0) / SHORT_CONTEXT)))


class _Count:
    """Number of spans of time that hold at once, on average over an interval."""

    def __init__(self, spans: Times) -> None:
        edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        self._times = [time for time, _ in edges] or [0.0]
        counts = accumulate(change for _, change in edges)
        seconds = (n * (end - begin) for (begin, end), n in zip(pairwise(self._times), counts, strict=False))
        self._sums = list(accumulate(seconds, initial=0.0))  # of all spans before each time

    def average(self, during: LoadInterval) -> float:
        before, after = np.interp((during.start, during.end), self._times, self._sums)
        return float(after - before) / max(during.end - during.start, 1e-9)
