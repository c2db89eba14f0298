"""Measured step latencies as data: what calibration writes, policies are seeded from, and the next run finds on disk.

On disk they are one JSON file per hardware, model and vLLM version. A file that cannot be read, or that was written for
something else, must never stop a run nor teach it nonsense: it is renamed `*.corrupt` with a warning, and the table is
learned again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from verl_tlt.ownership import foreign
from verl_tlt.speculation.types import OFF, ControlError

SCHEMA = 2
"""Version of the file format: 2 has stock vLLM's steps too. Any other than 1 and 2 is set aside."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LatencyPoint:
    """One measured engine step: the batch verified a draft of `draft_length` and drafted as many again."""

    batch: int
    kv_tokens: int
    draft_length: int
    """K, or OFF (-1) for a step without any drafter."""
    seconds: float
    samples: int = 1
    """Steps behind this figure; 0: it lies on a line between measured ones."""
    calibrated: bool = False
    """Measured in turn with the other draft lengths, on an engine that did nothing else: they can be compared."""


class StockPoint(NamedTuple):
    """One batch decoded by stock vLLM, and by an engine with a drafter that does not run; on the same clock."""

    batch: int
    stock_s: float
    """Seconds of a step without plugin and drafter, with the model runner that vLLM chooses then."""
    off_s: float
    """Of a step in OFF."""


@dataclass(frozen=True)
class LatencyTable:
    """Latency points of one machine, model and vLLM version, in no particular order."""

    points: tuple[LatencyPoint, ...]
    stock: tuple[StockPoint, ...] = ()
    """What stock vLLM takes, by batch, ascending; empty: not measured."""

    def arms(self) -> tuple[int, ...]:
        """Draft lengths that were measured, ascending, OFF included."""
        return tuple(sorted({p.draft_length for p in self.points}))

    def calibration(self) -> LatencyTable:
        """The points that were calibrated."""
        return LatencyTable(tuple(p for p in self.points if p.calibrated), self.stock)

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
            float(row["seconds"]), int(row.get("samples", 1)), bool(row.get("calibrated", False)),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ControlError(f"A latency row must hold batch, kv_tokens, draft_length, seconds: {row!r}.") from error
    sane = point.batch >= 1 and point.kv_tokens >= 0 and point.draft_length >= OFF and point.samples >= 0
    if not (sane and math.isfinite(point.seconds) and point.seconds > 0):
        raise ControlError(f"A latency row is out of range: {row!r}.")
    return point


def stock_points(rows: Sequence[Sequence[float]]) -> tuple[StockPoint, ...]:
    """Rows of (batch, stock_s, off_s), as JSON carries them, sorted by batch.

    Raises:
        ControlError: a row is no such measurement.
    """
    try:
        points = tuple(sorted(StockPoint(int(batch), float(stock), float(off)) for batch, stock, off in rows))
    except (TypeError, ValueError) as error:
        raise ControlError(f"What stock takes must be rows of (batch, stock_s, off_s), not {rows!r}.") from error
    if not all(p.batch >= 1 and 0 < p.stock_s < math.inf and 0 < p.off_s < math.inf for p in points):
        raise ControlError(f"What stock takes is out of range: {rows!r}.")
    return points


@dataclass(frozen=True)
class TableKey:
    """What latencies depend on."""

    hardware: str
    """Accelerator and how many the engine spans, for example `NVIDIA H100 80GB HBM3 x4`."""
    model: str
    """Policy and drafter: name, precision, whatever changes the cost of a step."""
    vllm: str
    """vLLM's version."""


def table_path(directory: str | Path, key: TableKey) -> Path:
    """Where the table of `key` lives: a readable name plus a digest of the whole key."""
    readable = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_")[:40] for part in asdict(key).values())
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:12]
    return Path(directory).expanduser() / f"{readable}-{digest}.json"


def save_table(directory: str | Path, key: TableKey, table: LatencyTable) -> Path:
    """Write a table so that a reader sees the old file or the new one, never half of either.

    Returns:
        The file written.

    Raises:
        OSError: the directory cannot be created or written.
    """
    path = table_path(directory, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, "key": asdict(key), "points": table.to_list(), "stock": table.stock}
    temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(mode=0o664, exist_ok=False)  # whatever the umask: what everybody may write to is not read
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def load_table(directory: str | Path, key: TableKey) -> LatencyTable | None:
    """The stored table of `key`; None when there is none, it had to be set aside, or anybody may have written it."""
    path = table_path(directory, key)
    if reason := foreign(path):
        logger.warning("The latency table %s is not read, since %s; latencies are learned anew.", path, reason)
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _set_aside(path, f"it cannot be read ({error})")
        return None
    try:
        return _checked(content, key)
    except ControlError as error:
        _set_aside(path, str(error))
        return None


def _checked(content: object, key: TableKey) -> LatencyTable:
    if not isinstance(content, dict) or content.get("schema") not in (1, SCHEMA):
        raise ControlError(f"it is not a latency table of schema 1 or {SCHEMA}")
    if content.get("key") != asdict(key):
        raise ControlError(f"it was measured for {content.get('key')}")
    return replace(LatencyTable.from_list(content.get("points", [])), stock=stock_points(content.get("stock", ())))


def _set_aside(path: Path, reason: str) -> None:
    aside = path.with_suffix(".corrupt")
    try:
        path.replace(aside)
    except OSError as error:
        logger.warning("The latency table %s is ignored, %s; it could not be renamed: %s.", path, reason, error)
        return
    logger.warning("The latency table %s was set aside as %s, %s; it is learned again.", path, aside.name, reason)
