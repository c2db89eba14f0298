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
"""Two contexts of a batch are close if they differ by less than this share of the widest difference at any batch."""
SHORT_CONTEXT = 32
"""Tokens of context of a request in the first measurement of each batch."""

CALIBRATED_STEPS = 16.0
"""Weight of a calibrated figure, in steps of the run. With a smaller weight, a machine that suddenly slows down would
change the factor of the K in use instead of the pace. With a larger one, the few steps of other K would teach too
little."""
FACTOR_STEPS = 256.0
"""Longest window of a draft length's own factor: a step counts 1/e after so many steps, which take some seconds."""
REBUILD_STEPS = 32
"""Steps between two lists of K, and window of the machine's pace: a step counts 1/e after so many. Acceptance, context
and pace hardly change in less than a second, and a rebuild takes 0.1 ms."""

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

        OFF is measured at every batch, another length only where vLLM has a CUDA graph for it. So a length is usable if
        it was measured at the next smaller or at the next larger batch that OFF was measured at.
        """
        if OFF not in self._curves:
            return list(self.lengths())
        measured = self._curves[OFF].batches
        next_smaller = measured[measured <= batch][-1:]
        next_larger = measured[measured >= batch][:1]
        neighbours = {*next_smaller, *next_larger}
        return [length for length in self.lengths() if neighbours & {*self._curves[length].batches}]

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
            field, problem = wrong_field(error)
            raise ControlError(f"Latency {field} {problem}") from error

    @cached_property
    def _curves(self) -> dict[int, _Curve]:
        lengths = {p.draft_length for p in self.points}
        return {length: _curve([p for p in self.points if p.draft_length == length]) for length in lengths}


def _curve(points: Iterable[LatencyPoint]) -> _Curve:
    by_batch: dict[int, list[tuple[float, float]]] = {}  # (context, seconds)
    for p in points:
        by_batch.setdefault(p.batch, []).append((p.kv_tokens / p.batch, p.seconds))
    widest = max(max(measured)[0] - min(measured)[0] for measured in by_batch.values())
    kv_token_s = 0.0  # seconds of a token of KV cache, by the last batch whose contexts are not close to each other
    batches, contexts, seconds, per_token = [], [], [], []
    for batch, measured in sorted(by_batch.items()):
        short_context, short_s = min(measured)
        long_context, long_s = max(measured)
        difference = long_context - short_context
        if difference > CLOSE * widest:
            kv_token_s = max(0.0, long_s - short_s) / difference / batch
        batches.append(batch)
        contexts.append(short_context)
        seconds.append(short_s)
        per_token.append(kv_token_s * batch)
    return _Curve(
        batches=np.array(batches, dtype=np.float64),
        context=np.array(contexts, dtype=np.float64),
        seconds=np.array(seconds, dtype=np.float64),
        per_token=np.array(per_token, dtype=np.float64),
    )


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
    measured wrongly, or between two batches that it measured. It starts at 1, with the weight of `CALIBRATED_STEPS`.
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
        context = step.kv_tokens / step.batch
        self._context = context
        self._context_of[octave] = context
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
