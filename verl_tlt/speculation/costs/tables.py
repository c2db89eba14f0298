"""The table of step costs: what calibration measures, what the policies start from, and what a run keeps on disk.

On disk a table is one JSON file per hardware, model and vLLM version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from verl_tlt.errors import TLTError, wrong_field
from verl_tlt.files.disk import expanded, replacing
from verl_tlt.files.json_files import read_object
from verl_tlt.messages import from_plain
from verl_tlt.speculation.types import OFF, ControlError

SCHEMA = 2
"""Version of the file format; 1 is read too, any other is set aside."""
CONTEXT_TOKENS = 32
"""Context per request in a calibration, which decodes short prompts a little way."""
CALIBRATED_SAMPLES = 4
"""Steps of a run that a calibrated figure counts as: it is the lower of medians over about as many."""

_MOST, _MOST_POINTS = 1 << 48, 10_000
"""Bounds of a table's numbers and of how many it has; a run's has some hundred."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LatencyPoint:
    """One measured engine step: the batch verified a draft of `draft_length` and drafted as many again."""

    batch: Annotated[int, Field(ge=1, le=_MOST)]
    kv_tokens: Annotated[int, Field(ge=0, le=_MOST)]
    draft_length: Annotated[int, Field(ge=OFF, le=64)]  # K, or OFF (-1) for a step without any drafter
    seconds: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
    samples: Annotated[int, Field(ge=0, le=_MOST)] = 1
    """Steps behind this figure; 0: it is interpolated between measured draft lengths."""
    calibrated: bool = False
    """Measured in turn with the other draft lengths, on an engine that did nothing else: they can be compared."""


@dataclass(frozen=True)
class LatencyTable:
    """Latency points of one machine, model and vLLM version, in no particular order."""

    points: tuple[LatencyPoint, ...] = ()

    @classmethod
    def calibrated(cls, rows: Mapping[int, Iterable[tuple[int, float]]]) -> LatencyTable:
        """A calibration's figures: (batch, seconds) by draft length, OFF included."""
        measured = [(batch, k, seconds) for k, row in rows.items() for batch, seconds in sorted(row)]
        return cls(tuple(LatencyPoint(b, b * CONTEXT_TOKENS, k, s, CALIBRATED_SAMPLES, True) for b, k, s in measured))

    def lengths(self) -> tuple[int, ...]:
        """Draft lengths with a point, ascending, OFF included."""
        return tuple(sorted({p.draft_length for p in self.points}))

    def calibration(self) -> LatencyTable:
        return LatencyTable(tuple(p for p in self.points if p.calibrated))

    def by_batch(self, draft_length: int) -> list[tuple[int, float]]:
        """(batch, seconds), ascending."""
        return sorted((p.batch, p.seconds) for p in self.points if p.draft_length == draft_length)

    def for_lengths(self, lengths: Iterable[int]) -> LatencyTable:
        """The points of OFF and these lengths; between measured draft lengths they are interpolated, linear in K.

        A token more costs a pass of the drafter and a verified position. OFF is never interpolated.
        """
        wanted = {OFF, *lengths}
        measured = [k for k in self.lengths() if k >= 0]
        points = [p for p in self.points if p.draft_length in wanted]
        for length in sorted(wanted - {OFF, *measured}):
            if not measured or not measured[0] < length < measured[-1]:
                continue
            shorter, longer = max(k for k in measured if k < length), min(k for k in measured if k > length)
            below, above = dict(self.by_batch(shorter)), dict(self.by_batch(longer))
            share = (length - shorter) / (longer - shorter)
            for batch in sorted(below.keys() & above.keys()):
                seconds = (1 - share) * below[batch] + share * above[batch]
                points.append(LatencyPoint(batch, batch * CONTEXT_TOKENS, length, seconds, 0, True))
        return LatencyTable(tuple(points))

    def covers(self, lengths: Sequence[int], batch: int) -> bool:
        """Whether all `lengths` have points, the first one up to `batch` at least."""
        return {*lengths} <= {*self.lengths()} and self.by_batch(lengths[0])[-1][0] >= batch

    def to_list(self) -> list[dict[str, Any]]:
        return [asdict(p) for p in self.points]

    @classmethod
    def from_list(cls, rows: object) -> LatencyTable:
        """Rows as `to_list` wrote them; ControlError where one cannot be a latency measurement."""
        try:
            return from_plain(cls, {"points": rows})
        except ValidationError as error:
            raise ControlError("Latency {} {}".format(*wrong_field(error))) from error


def interpolate(points: Sequence[tuple[float, float]], batch: float) -> float:
    """Seconds at `batch` by sorted (batch, seconds): linear between them, the last slope beyond, flat below."""
    high_batch, high = points[-1]
    smaller = [point for point in points if point[0] < high_batch]
    if batch <= high_batch or not smaller:
        batches, seconds = zip(*points, strict=True)
        return float(np.interp(batch, batches, seconds))
    low_batch, low = smaller[-1]
    # Noise can make the last slope negative; a larger batch never takes less than the largest one measured.
    return high + max(0.0, (high - low) / (high_batch - low_batch)) * (batch - high_batch)


@dataclass(frozen=True)
class TableKey:
    """What latencies depend on."""

    hardware: str  # accelerator and how many the engine spans, for example `NVIDIA H100 80GB HBM3 x4`
    model: str  # policy and drafter: name, precision, whatever changes the cost of a step
    vllm: str  # vLLM's version


def table_path(directory: str | Path, key: TableKey) -> Path:
    """Where the table of `key` lives: a readable name plus a digest of the whole key."""
    readable = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_")[:40] for part in asdict(key).values())
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:12]
    return expanded(directory) / f"{readable}-{digest}.json"


def save_table(directory: str | Path, key: TableKey, table: LatencyTable) -> Path:
    """Write a table so that a reader sees the old file or the new one, never half of either; its path, or OSError."""
    path = table_path(directory, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, "key": asdict(key), "points": table.to_list()}
    with replacing(path) as file:
        file.write(json.dumps(content, indent=1).encode())
    return path


def load_table(directory: str | Path, key: TableKey) -> LatencyTable | None:
    """The stored table of `key`; None where there is none that can be used, which is logged; it is replaced later."""
    path = Path(directory)
    try:
        path = table_path(directory, key)
        if not os.path.lexists(path):
            return None
        content = read_object(path)
        if content.get("schema") not in (1, SCHEMA):
            raise ControlError(f"it is not a latency table of schema 1 or {SCHEMA}")
        if content.get("key") != asdict(key):
            raise ControlError(f"it was measured for {str(content.get('key'))[:500]}")
        points = content.get("points", [])
        if isinstance(points, list) and len(points) > _MOST_POINTS:
            raise ControlError(f"it has {len(points)} points")
        return LatencyTable.from_list(points)
    except (TLTError, ValueError) as error:
        logger.warning("Step costs are not read from %s, and learned anew: %s", path, error)
        return None
