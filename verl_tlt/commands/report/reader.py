"""Reads a trace directory back into typed records; the run that writes it may still be going.

Lines that cannot be read are counted and skipped. A resumed run repeats the steps after its checkpoint; of a step that
was written twice, the records of the later run count.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from verl_tlt.errors import TLTError
from verl_tlt.speculation.step_control import OLDER
from verl_tlt.trace import events
from verl_tlt.trace.events import Event, RunStarted

_ADAPTERS: dict[str, TypeAdapter[Event]] = {kind: TypeAdapter(cls) for kind, cls in events.EVENT_TYPES.items()}


class TraceError(TLTError, ValueError):
    """The directory holds nothing that can be read; the message names it."""


class EngineSteps(NamedTuple):
    """The n steps of one engine as columns, in the order of time."""

    t: npt.NDArray[np.float64]
    """[n] unix seconds at which the step finished."""
    batch: npt.NDArray[np.int64]
    """[n] decode-phase requests."""
    k: npt.NDArray[np.int64]
    """[n] tokens drafted per request; -1 where the drafter did not run."""
    latency_s: npt.NDArray[np.float64]
    """[n] seconds."""


@dataclass(frozen=True)
class RunTrace:
    """What a run wrote, without the steps that a later run repeated; each list is in the order of time."""

    directory: Path
    runs: list[RunStarted] = field(default_factory=list)
    steps: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """RL step -> its metrics, ascending; only finished steps."""
    off: Mapping[int, str] = field(default_factory=dict)
    """RL step -> why no replica drafted in it."""
    phases: list[events.Phase] = field(default_factory=list)
    loads: list[events.LoadSample] = field(default_factory=list)
    sessions: list[events.Session] = field(default_factory=list)
    publishes: list[events.Publish] = field(default_factory=list)
    reloads: list[events.Reload] = field(default_factory=list)
    stops: list[events.Stopped] = field(default_factory=list)
    engine_files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    """Name or number of a replica -> files of its engine's steps; empty where engine steps were not traced."""
    skipped: int = 0
    """Lines that could not be read."""

    @property
    def run(self) -> RunStarted | None:
        return self.runs[-1] if self.runs else None

    @property
    def standalone(self) -> bool:
        """Whether engines decode while the trainer works: a step's `timing_s/gen` is then its wait for samples."""
        return self.run is not None and bool(self.run.standalone)

    @cached_property
    def replicas(self) -> list[str]:
        """Names of all replicas: those of the `run` event in its order, then others by name, and trainer's devices."""
        named = list(self.run.replicas) if self.run else []
        trained = {s.replica for s in self.sessions if s.replica.startswith(events.TRAINER_DEVICE)}
        others = trained.union(*(load.inflight for load in self.loads)) - set(named)
        return named + sorted(others)

    def label(self, replica: str) -> str:
        """A replica's name in pictures; its name in the trace may be an address."""
        known = replica in self.replicas and not replica.startswith(events.TRAINER_DEVICE)
        return f"replica {self.replicas.index(replica)}" if known else replica

    @cached_property
    def engines_since(self) -> float:
        """Unix seconds from which on no engine step was dropped, as the oldest are; -inf: none was."""
        since = -math.inf
        for files in self.engine_files.values():
            if len(files) < 2:
                continue  # nothing of this engine was dropped
            first = min(_first_time(file) for file in files)
            if first < math.inf:
                since = max(since, first)
        return since

    def engine(self, replica: str, start: float, end: float) -> EngineSteps:
        """Those steps of the replica's engine that ended in these unix seconds: a run can have millions."""
        files = self.engine_files.get(replica)
        if not files:
            number = str(self.replicas.index(replica))
            files = self.engine_files.get(number, ())
        return engine_steps(files, start, end)


def read_trace(directory: str | Path) -> RunTrace:
    """Read the trainer's files of a trace directory; a `TraceError` says that there is none with an event."""
    path = Path(directory)
    if not path.is_dir():
        raise TraceError(f"{path} is not a directory: give the trace directory of a run (tlt.trace.dir).")
    parsed: list[Event] = []
    engine_files: defaultdict[str, list[Path]] = defaultdict(list)
    skipped = 0
    for file in sorted([*path.glob("*.jsonl"), *path.glob(f"*.jsonl{OLDER}")]):
        if file.name.startswith(events.ENGINE_PREFIX):
            engine_files[file.name.removeprefix(events.ENGINE_PREFIX).rpartition(".jsonl")[0]].append(file)
            continue
        with file.open("rb") as lines:
            for line in lines:
                if (event := parse_event(record_of(line))) is not None:
                    parsed.append(event)
                elif line.strip():
                    skipped += 1
    if not parsed and not engine_files:
        raise TraceError(f"{path} holds no trace: give the trace directory of a run (tlt.trace.dir).")
    parsed = _without_repeated(_renamed(sorted(parsed, key=lambda e: e.t)))
    by_type: defaultdict[type[Event], list[Any]] = defaultdict(list)
    for event in parsed:
        by_type[type(event)].append(event)
    last_of_steps = {event.step: event for event in by_type[events.Step]}
    steps = dict(sorted(last_of_steps.items()))
    return RunTrace(
        path,
        runs=by_type[RunStarted],
        steps={number: step.metrics for number, step in steps.items()},
        off={number: step.off for number, step in steps.items() if step.off},
        phases=by_type[events.Phase],
        loads=by_type[events.LoadSample],
        sessions=by_type[events.Session],
        publishes=by_type[events.Publish],
        reloads=by_type[events.Reload],
        stops=by_type[events.Stopped],
        engine_files=engine_files,
        skipped=skipped,
    )


def parse_event(record: Mapping[str, Any]) -> Event | None:
    """The event of one line; None where the kind is unknown, a key is missing or a value is of the wrong type."""
    adapter = _ADAPTERS.get(str(record.get("kind")))
    if adapter is None:
        return None
    known = {key: value for key, value in record.items() if value is not None}
    for key in ("metrics", "tau"):
        if isinstance(numbers := known.get(key), dict):
            known[key] = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
    if isinstance(counts := known.get("inflight"), dict):  # every line repeats the names
        known["inflight"] = {sys.intern(name): count for name, count in counts.items()}
    try:
        return adapter.validate_python(known)
    except ValidationError:
        return None


def record_of(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; empty where there is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _renamed(parsed: list[Event]) -> list[Event]:
    """The events with each replica under the name that the last run gave to the replica of that number.

    A resumed run's replicas have other addresses.
    """
    starts = [event for event in parsed if isinstance(event, RunStarted)]
    last = starts[-1].replicas if starts else ()
    names: dict[str, str] = {}
    renamed: list[Event] = []
    for event in parsed:
        if isinstance(event, RunStarted):
            names = {name: new for name, new in zip(event.replicas, last, strict=False) if name != new}
        elif isinstance(event, events.LoadSample) and names:  # a run has very many of them
            event = replace(event, inflight={names.get(name, name): n for name, n in event.inflight.items()})
        elif isinstance(event, events.Session | events.Reload):
            event = replace(event, replica=names.get(event.replica, event.replica))
        renamed.append(event)
    return renamed


def _without_repeated(parsed: list[Event]) -> list[Event]:
    """The events without those of steps that a later run repeated."""
    steps = np.array([getattr(event, "step", -np.inf) for event in parsed])
    kept = np.ones(len(parsed), bool)
    for i, event in enumerate(parsed):
        if isinstance(event, RunStarted):
            kept[:i] &= steps[:i] < event.step0
    return [event for event, keep in zip(parsed, kept, strict=True) if keep]


def engine_steps(files: Sequence[Path], start: float, end: float) -> EngineSteps:
    """The steps in these files that ended in these unix seconds; lines that cannot be read are left out."""
    numbers = array("d")
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                if start <= _time_of(line) <= end:
                    numbers.extend(_engine_step(record_of(line)))
    rows = np.array(numbers).reshape(-1, len(EngineSteps._fields))
    t, batch, k, latency_s = rows[np.argsort(rows[:, 0], kind="stable")].T
    return EngineSteps(t, batch.astype(np.int64), k.astype(np.int64), latency_s)


def _time_of(line: bytes) -> float:
    """The time of an engine step, with which its line begins; far faster than reading the whole line."""
    try:
        return float(line[len('{"t":') : line.index(b",")])
    except ValueError:
        return math.nan


def _first_time(file: Path) -> float:
    """The time of a file's first engine step; infinity: it has none."""
    with file.open("rb") as lines:
        for line in lines:
            t = _time_of(line)
            if not math.isnan(t):
                return t
    return math.inf


def _engine_step(record: Mapping[str, Any]) -> list[float]:
    """The columns of `EngineSteps`; none: the line is malformed."""
    try:
        latency_s = float(record.get("latency_s") or 0)
        return [float(record["t"]), float(record["batch"]), float(record["k"]), latency_s]
    except (KeyError, TypeError, ValueError):
        return []
