"""Measured step latencies as plain data: what calibration writes, the store keeps and policies are seeded from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_tlt.control.errors import ControlError
from verl_tlt.control.types import OFF


@dataclass(frozen=True)
class LatencyPoint:
    """One measured engine step: the batch verified a draft of `draft_length` and drafted as many again."""

    batch: int
    kv_tokens: int
    draft_length: int
    """K, or OFF (-1) for a step without any drafter."""
    seconds: float
    samples: int = 1
    """Steps behind this figure."""


@dataclass(frozen=True)
class LatencyTable:
    """Latency points of one machine, model and vLLM version, in no particular order."""

    points: tuple[LatencyPoint, ...]

    def arms(self) -> tuple[int, ...]:
        """Draft lengths that were measured, ascending, OFF included."""
        return tuple(sorted({p.draft_length for p in self.points}))

    def to_list(self) -> list[dict[str, Any]]:
        """JSON-able rows."""
        return [asdict(p) for p in self.points]

    @classmethod
    def from_list(cls, rows: Sequence[Mapping[str, Any]]) -> LatencyTable:
        """Rows as `to_list` wrote them.

        Raises:
            ControlError: a row lacks a field, or a field cannot be a latency measurement.
        """
        if isinstance(rows, str | bytes) or not isinstance(rows, Sequence):
            raise ControlError(f"A latency table must be a list of rows, not {type(rows).__name__}.")
        return cls(tuple(_point(row) for row in rows))


def _point(row: Mapping[str, Any]) -> LatencyPoint:
    try:
        point = LatencyPoint(
            int(row["batch"]), int(row["kv_tokens"]), int(row["draft_length"]),
            float(row["seconds"]), int(row.get("samples", 1)),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ControlError(f"A latency row must hold batch, kv_tokens, draft_length, seconds: {row!r}.") from error
    sane = point.batch >= 1 and point.kv_tokens >= 0 and point.draft_length >= OFF and point.samples >= 1
    if not (sane and math.isfinite(point.seconds) and point.seconds > 0):
        raise ControlError(f"A latency row is out of range: {row!r}.")
    return point
