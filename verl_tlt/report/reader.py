"""Reads a trace directory back into typed records, also while the run that writes it is still going.

Half a line at the end of a file is a line still being written, or a process that was killed: it is skipped and counted.
A run that was resumed repeats the steps after its checkpoint: of a step written twice, the later run's records count.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from verl_tlt.errors import TLTError
from verl_tlt.trace.events import (
    ENGINE_PREFIX,
    EVENT_TYPES,
    Event,
    Idle,
    LoadSample,
    Phase,
    Publish,
    Reload,
    RunStarted,
    Session,
    Step,
    Stopped,
    required_fields,
)

E = TypeVar("E", bound=Event)


class TraceError(TLTError, ValueError):
    """There is no trace to read; the message names the directory."""


@dataclass(frozen=True)
class EngineSteps:
    """The steps of one engine in columns, oldest first; n steps, drafts of up to `kmax` tokens."""

    t: npt.NDArray[np.float64]
    """[n] unix seconds at which the step finished."""
    batch: npt.NDArray[np.int64]
    """[n] decode-phase requests."""
    kv: npt.NDArray[np.int64]
    """[n] tokens of context they held."""
    k: npt.NDArray[np.int64]
    """[n] tokens drafted per request; -1 where the drafter did not run."""
    drafts: npt.NDArray[np.int64]
    """[n] requests that had a draft verified."""
    accepted: npt.NDArray[np.int64]
    """[n, kmax] how many of those drafts had their first i+1 tokens accepted."""
    produced: npt.NDArray[np.int64]
    """[n] tokens produced."""
    latency_s: npt.NDArray[np.float64]
    """[n] seconds."""

    def between(self, start: float, end: float) -> EngineSteps:
        """The steps that finished in [start, end]."""
        keep = slice(*np.searchsorted(self.t, (start, np.nextafter(end, np.inf))))
        return EngineSteps(**{f.name: getattr(self, f.name)[keep] for f in dataclasses.fields(self)})


@dataclass(frozen=True)
class RunTrace:
    """Everything a run wrote down, void steps left out, each list in the order of time."""

    directory: Path
    runs: list[RunStarted] = field(default_factory=list)
    steps: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """RL step -> its metrics, ascending; finished steps only."""
    phases: list[Phase] = field(default_factory=list)
    loads: list[LoadSample] = field(default_factory=list)
    idles: list[Idle] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    reloads: list[Reload] = field(default_factory=list)
    stops: list[Stopped] = field(default_factory=list)
    engines: dict[str, EngineSteps] = field(default_factory=dict)
    """Replica -> its engine's steps; empty when `tlt.trace.engine_steps` was off."""
    skipped: int = 0
    """Lines that could not be read."""

    @property
    def run(self) -> RunStarted | None:
        """The latest start of the run."""
        return self.runs[-1] if self.runs else None

    @cached_property
    def replicas(self) -> list[str]:
        """Names of all replicas seen: in the order of the `run` event, then any others by name."""
        named = list(self.run.replicas) if self.run else []
        others = {name for load in self.loads for name in load.inflight} - set(named)
        return named + sorted(others)

    def label(self, replica: str) -> str:
        """What to call a replica in pictures; its name may be an address, an engine's file may carry its number."""
        if replica in self.replicas:
            return f"replica {self.replicas.index(replica)}"
        return f"replica {replica}" if replica.isdigit() else replica

    def engine(self, replica: str) -> EngineSteps | None:
        """The replica's engine steps, from the file that carries its name or its number; None: there is none."""
        found = self.engines.get(replica)
        return self.engines.get(str(self.replicas.index(replica))) if found is None else found

    def phase(self, step: int, name: str) -> Phase | None:
        """The phase of that name in that step, or None."""
        return next((p for p in self.phases if p.step == step and p.name == name), None)


def read_trace(directory: str | Path) -> RunTrace:
    """Read every `*.jsonl` file of a trace directory.

    Raises:
        TraceError: the directory does not exist, or holds no event.
    """
    path = Path(directory)
    if not path.is_dir():
        raise TraceError(f"{path} is not a directory; give the trace directory of a run (tlt.trace.dir).")
    trace = RunTrace(path)
    events: list[Event] = []
    engines: dict[str, list[dict[str, Any]]] = {}
    skipped = 0
    for file in sorted(path.glob("*.jsonl")):
        for record in _records(file):
            if record is None:
                skipped += 1
            elif file.name.startswith(ENGINE_PREFIX):
                engines.setdefault(file.stem.removeprefix(ENGINE_PREFIX), []).append(record)
            elif (event := parse_event(record)) is None:
                skipped += 1
            else:
                events.append(event)
    if not events and not engines:
        raise TraceError(f"{path} holds no trace: no *.jsonl file in it has a readable event.")
    events, voids = _drop_void(sorted(events, key=lambda e: e.t))
    steps = {e.step: e.metrics for e in _of(events, Step)}
    return dataclasses.replace(
        trace,
        runs=_of(events, RunStarted),
        steps={step: steps[step] for step in sorted(steps)},
        phases=_of(events, Phase),
        loads=_of(events, LoadSample),
        idles=_of(events, Idle),
        sessions=_of(events, Session),
        publishes=_of(events, Publish),
        reloads=_of(events, Reload),
        stops=_of(events, Stopped),
        engines={name: _columns(rows, voids) for name, rows in engines.items()},
        skipped=skipped,
    )


def parse_event(record: Mapping[str, Any]) -> Event | None:
    """The typed event of one line; None for an unknown kind or missing keys. Extra keys are ignored."""
    cls = EVENT_TYPES.get(str(record.get("kind")))
    if cls is None or not (required_fields(cls) | {"t"}) <= record.keys():
        return None
    names = {f.name for f in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in record.items() if key in names})


def _records(file: Path) -> Iterator[dict[str, Any] | None]:
    """Each line as a dict; None for a line that is not a JSON object."""
    with file.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            yield record if isinstance(record, dict) else None


def _of(events: Sequence[Event], cls: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, cls)]


def _drop_void(events: list[Event]) -> tuple[list[Event], list[tuple[float, float]]]:
    """Drop what a later run repeated. Returns what is left and the void stretches of time (for engine steps)."""
    voids: list[tuple[float, float]] = []
    kept: list[Event] = []
    for event in events:
        if isinstance(event, RunStarted):
            first = event.step0
            void = [e for e in kept if not isinstance(e, RunStarted) and e.step >= first]
            if void:
                voids.append((min(getattr(e, "start", e.t) for e in void), event.t))
            kept = [e for e in kept if isinstance(e, RunStarted) or e.step < first]
        kept.append(event)
    return kept, voids


def _columns(rows: list[dict[str, Any]], voids: list[tuple[float, float]]) -> EngineSteps:
    rows = [r for r in rows if {"t", "batch", "k"} <= r.keys() and not any(a <= r["t"] < b for a, b in voids)]
    rows.sort(key=lambda r: r["t"])
    kmax = max((len(r.get("accepted") or ()) for r in rows), default=0)
    accepted = np.zeros((len(rows), kmax), dtype=np.int64)
    for i, row in enumerate(rows):
        values = row.get("accepted") or ()
        accepted[i, : len(values)] = values

    def ints(name: str) -> npt.NDArray[np.int64]:
        return np.array([row.get(name) or 0 for row in rows], dtype=np.int64)

    def floats(name: str) -> npt.NDArray[np.float64]:
        return np.array([row.get(name) or 0.0 for row in rows], dtype=np.float64)

    return EngineSteps(
        t=floats("t"),
        batch=ints("batch"),
        kv=ints("kv"),
        k=ints("k"),
        drafts=ints("drafts"),
        accepted=accepted,
        produced=ints("produced"),
        latency_s=floats("latency_s"),
    )
