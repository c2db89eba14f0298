"""What an engine step takes by draft length, batch and context, as calibrated at the start of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from verl_tlt.errors import wrong_field
from verl_tlt.messages import from_plain
from verl_tlt.speculation.types import OFF, ControlError, Step

CLOSE = 0.2
"""Contexts are close to each other that differ by less than this share of the widest difference at any batch."""
SHORT_CONTEXT = 32
"""Tokens of context of a request in the first measurement of each batch."""

CALIBRATED_STEPS = 16.0
"""Steps of the run that a calibrated figure counts as. It is the median of fewer, but a machine that suddenly slows
down is to change the pace, and not the factor of the K in use. With more, the few steps of other K tell too little."""
FACTOR_STEPS = 256.0
"""Steps after which a step counts 1/e in a draft length's own factor, at most: some seconds."""
REBUILD_STEPS = 32
"""Steps between two lists of K, and after which a step counts 1/e in the machine's pace. Acceptance, context and pace
hardly change in less than a second, and a rebuild takes 0.1 ms."""

Array = npt.NDArray[np.float64]
Numbers = float | npt.NDArray[np.float64] | npt.NDArray[np.int_]


@dataclass(frozen=True)
class LatencyPoint:
    """A measured engine step: the batch verified a draft of `draft_length` tokens and drafted as many again."""

    batch: Annotated[int, Field(ge=1)]
    kv_tokens: Annotated[int, Field(ge=0)]  # tokens of context that the batch held
    draft_length: Annotated[int, Field(ge=OFF)]  # K, or OFF (-1) for a step without the drafter's pass
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Curve(NamedTuple):
    """Steps of one draft length, by measured batch."""

    batches: Array
    context: Array  # tokens of context of a request
    seconds: Array  # at that context
    per_token: Array  # seconds that each further token of context adds


@dataclass(frozen=True)
class LatencyTable:
    """Calibrated steps; seconds are linear between measured batches, and between the two contexts of a batch.

    A larger batch continues the last slope. Where a batch was measured at one context only, or at two that are close to
    each other, so that noise would make the difference, a token of KV cache takes as long as at the next smaller batch.
    """

    points: tuple[LatencyPoint, ...] = ()

    def lengths(self) -> tuple[int, ...]:
        """Draft lengths with a point, ascending, OFF included."""
        return tuple(sorted(self._curves))

    def usable(self, batch: float) -> list[int]:
        """Draft lengths that an engine can use for so many requests, ascending, OFF included.

        A length without a graph is not measured, but OFF is. So the next smaller or larger batch of OFF's must have it.
        """
        off = self._curves[OFF].batches if OFF in self._curves else np.zeros(0)
        near = {*off[off <= batch][-1:], *off[off >= batch][:1]}
        return [length for length in self.lengths() if not near or near & {*self._curves[length].batches}]

    def by_batch(self, draft_length: int) -> list[tuple[int, float]]:
        """(batch, seconds) at the shorter context of each batch, ascending."""
        curve = self._curves.get(draft_length)
        return [] if curve is None else [(int(b), float(s)) for b, s in zip(curve.batches, curve.seconds, strict=True)]

    def seconds(self, length: int, batch: Numbers, context: Numbers = SHORT_CONTEXT) -> Array:
        """Seconds of a steady step at each `batch` with `context` tokens a request; `length` is one of `lengths`."""
        curve = self._curves[length]
        short = _line(batch, curve.batches, curve.seconds - curve.per_token * curve.context)
        return short + _line(batch, curve.batches, curve.per_token) * np.asarray(context)

    def to_list(self) -> list[dict[str, Any]]:
        return [asdict(p) for p in self.points]

    @classmethod
    def from_list(cls, rows: object) -> LatencyTable:
        """Rows as `to_list` wrote them; ControlError where one cannot be a measurement."""
        try:
            return from_plain(cls, {"points": rows})
        except ValidationError as error:
            raise ControlError("Latency {} {}".format(*wrong_field(error))) from error

    @cached_property
    def _curves(self) -> dict[int, _Curve]:
        lengths = {p.draft_length for p in self.points}
        return {length: _curve([p for p in self.points if p.draft_length == length]) for length in lengths}


def _curve(points: Iterable[LatencyPoint]) -> _Curve:
    by_batch: dict[int, list[tuple[float, float]]] = {}
    for p in points:
        by_batch.setdefault(p.batch, []).append((p.kv_tokens / p.batch, p.seconds))
    batches, contexts, seconds, per_token = [], [], [], []
    of_kv_token, widest = 0.0, max(max(measured)[0] - min(measured)[0] for measured in by_batch.values())
    for batch, measured in sorted(by_batch.items()):
        (context, least), (longer, more) = min(measured), max(measured)
        if longer - context > CLOSE * widest:
            of_kv_token = max(0.0, more - least) / (longer - context) / batch
        batches.append(batch)
        contexts.append(context)
        seconds.append(least)
        per_token.append(of_kv_token * batch)
    return _Curve(*(np.array(column, dtype=np.float64) for column in (batches, contexts, seconds, per_token)))


def _line(at: Numbers, batches: Array, values: Array) -> Array:
    """Linear between the measured batches, flat below the first; beyond the last, the last slope or flat."""
    found = np.interp(at, batches, values)
    if len(batches) > 1:  # noise can make the last slope negative, and more requests never take less time
        slope = max(0.0, (values[-1] - values[-2]) / (batches[-1] - batches[-2]))
        found = found + slope * np.maximum(0.0, np.asarray(at) - batches[-1])
    return np.asarray(found)


class LiveCosts:
    """Calibrated seconds of each draft length by batch, corrected by the steps of the run.

    Measured = calibrated x pace x own factor. The pace follows the machine from step to step, and is the same for all
    draft lengths and batches. Each draft length has a factor of its own per octave of the batch: what the calibration
    measured wrongly, or between two batches that it measured. It starts as if the calibrated steps had shown 1.
    """

    def __init__(self, table: LatencyTable, lengths: Sequence[int], largest_batch: int) -> None:
        self.lengths = [k for k in lengths if k in table.lengths()]
        """Draft lengths that were measured, ascending; the rows of `seconds`."""
        batches = np.arange(largest_batch + 1)
        self._octave_of = np.array([batch.bit_length() for batch in range(largest_batch + 1)])
        self._no_context = np.array([table.seconds(k, batches, 0.0) for k in self.lengths])  # [lengths, batches]
        self._per_token = np.array([table.seconds(k, batches, 1.0) for k in self.lengths]) - self._no_context
        octaves = largest_batch.bit_length() + 1
        self._context = float(SHORT_CONTEXT)  # tokens of context of a request, in the last step
        self._context_of: list[float | None] = [None] * octaves  # in the last step with such a batch
        self._pace = 1.0
        self._factor = [[1.0] * octaves for _ in self.lengths]
        self._steps = [[CALIBRATED_STEPS] * octaves for _ in self.lengths]  # that each factor rests on

    def observe(self, step: Step) -> None:
        """Learn from a finished step of at least one request."""
        octave = step.batch.bit_length()
        context = self._context = self._context_of[octave] = step.kv_tokens / step.batch
        if not step.clean or step.drafted not in self.lengths:
            return
        row = self.lengths.index(step.drafted)
        factors = self._factor[row]
        steps = self._steps[row]
        expected = float(self._no_context[row, step.batch] + context * self._per_token[row, step.batch])
        ratio = min(step.latency_s / expected, 2.0 * self._pace)  # one that takes longer was held up by something else
        self._pace += (ratio / factors[octave] - self._pace) / REBUILD_STEPS
        steps[octave] = min(steps[octave] + 1.0, FACTOR_STEPS)
        factors[octave] += (ratio / self._pace - factors[octave]) / steps[octave]

    def seconds(self) -> Array:
        """Seconds at the pace of the calibration, at the context that such batches had last, [lengths, batches]."""
        contexts = np.array([self._context if context is None else context for context in self._context_of])
        calibrated = self._no_context + self._per_token * contexts[self._octave_of]
        return calibrated * np.array(self._factor)[:, self._octave_of]
