"""Writes a run as a timeline for trace viewers: Chrome's JSON array of events, for Perfetto and chrome://tracing.

The trainer and each replica are a process. A replica has a track of its engine (rollout, bubbles, then sleep and the
policy's update) and one of its sessions; batch and draft length are counters. Times are microseconds since the start.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_tlt.commands.report.reader import EngineSteps, RunTrace
from verl_tlt.commands.report.steps import RLStep, rl_steps
from verl_tlt.files.ownership import replacing
from verl_tlt.trace.events import Session

TRAINER, FIRST_REPLICA = 1, 100  # ids of processes
DRIVER = 1  # track of the trainer: its steps
ENGINE, SPOT = 1, 2  # tracks of a replica
MOST_SAMPLES = 100_000
"""Samples of one counter; viewers become slow with millions."""

ChromeEvent = dict[str, Any]


def write_chrome_trace(path: Path, trace: RunTrace) -> None:
    """Write the timeline; a `TraceError` says that the trace holds no finished rollout."""
    with replacing(path) as file:
        file.write(b"[\n")
        for i, event in enumerate(chrome_events(trace)):
            line = json.dumps(event, separators=(",", ":"), allow_nan=False)
            file.write(((",\n" if i else "") + line).encode())
        file.write(b"\n]\n")


def chrome_events(trace: RunTrace) -> Iterator[ChromeEvent]:
    """All events; those with a duration in the order in which they begin on their track."""
    steps = list(rl_steps(trace).values())
    zero = min(step.start for step in steps)
    for event in _events(trace, steps):
        event["ts"] = round((event["ts"] - zero) * 1e6) if "ts" in event else 0
        if "dur" in event:
            event["dur"] = max(0, round((event["dur"] - zero) * 1e6) - event["ts"])
        yield event


def _events(trace: RunTrace, steps: Sequence[RLStep]) -> Iterator[ChromeEvent]:
    """The events with unix seconds for times, and with their end for `dur`."""
    yield from _names(TRAINER, "trainer", 0, {DRIVER: "RL step"})
    yield from _trainer(trace, steps)
    standalone = set(trace.run.standalone if trace.run else ())
    sessions = defaultdict(list)
    for session in (s for step in steps for s in step.sessions):
        sessions[session.replica].append(session)
    for i, replica in enumerate(trace.replicas):
        pid = FIRST_REPLICA + i
        yield from _names(pid, trace.label(replica), i + 1, {ENGINE: "engine", SPOT: "sessions"})
        yield from _engine_track(pid, replica, steps, replica in standalone)
        yield from _sessions(pid, sessions[replica])
        if (engine := trace.engine(replica)) is not None:
            yield from _counters(pid, engine, steps)


def _names(pid: int, name: str, order: int, tracks: Mapping[int, str]) -> Iterator[ChromeEvent]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": order}}
    for tid, track in tracks.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}}


def _trainer(trace: RunTrace, steps: Sequence[RLStep]) -> Iterator[ChromeEvent]:
    """Each step with its phases inside."""
    phases = defaultdict(list)
    for phase in trace.phases:
        phases[phase.step].append(phase)
    for step in steps:
        shown = {name: value for name, value in trace.steps.get(step.step, {}).items() if name.startswith("tlt/")}
        yield _slice(TRAINER, DRIVER, f"step {step.step}", step.start, step.finish, shown)
        for phase in phases[step.step]:
            start, end = max(phase.start, step.start), min(phase.end, step.finish)
            yield _slice(TRAINER, DRIVER, phase.name, start, end, {"step": step.step})
    for p in trace.publishes:
        args = {"version": p.version, "reason": p.reason, "gain": p.gain, **p.tau}
        yield {"ph": "i", "ts": p.t, "pid": TRAINER, "tid": DRIVER, "name": f"drafter {p.decision}", "s": "p",
               "args": args}  # fmt: skip


def _engine_track(pid: int, replica: str, steps: Sequence[RLStep], standalone: bool) -> Iterator[ChromeEvent]:
    """Rollouts with their bubbles, and the sleep between them; standalone replicas do not sleep."""
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        yield _slice(pid, ENGINE, "rollout", step.start, step.end, {"step": step.step})
        for b in (b for b in step.bubbles if b.replica == replica):
            yield _slice(pid, ENGINE, "bubble", max(b.start, step.start), min(b.end, step.end), {})
        until = step.finish if after is None else min(step.finish, after.start)
        if standalone or until <= step.end:
            continue
        yield _slice(pid, ENGINE, "sleep", step.end, until, {"step": step.step})
        for phase in step.after:
            yield _slice(pid, ENGINE, phase.name, max(phase.start, step.end), min(phase.end, until), {})


def _sessions(pid: int, sessions: Sequence[Session]) -> Iterator[ChromeEvent]:
    shown = ("step", "steps", "tokens", "epochs", "loss", "outcome", "error")
    for session in sessions:
        args = {name: getattr(session, name) for name in shown}
        if math.isnan(session.loss):
            del args["loss"]
        yield _slice(pid, SPOT, "session", session.start, session.end, args)


def _counters(pid: int, engine: EngineSteps, steps: Sequence[RLStep]) -> Iterator[ChromeEvent]:
    """Batch and draft length where they change; after a rollout 0 and -1. A long run keeps every n-th change."""
    parts = [engine.between(step.start, step.end) for step in steps]
    for name, idle in (("batch", 0), ("K", -1)):
        columns = [part.batch if name == "batch" else part.k for part in parts]
        changed = [np.flatnonzero(np.diff(values, prepend=values[:1] - 1)) for values in columns]
        every = -(-sum(map(len, changed)) // MOST_SAMPLES) or 1
        for step, part, values, at in zip(steps, parts, columns, changed, strict=True):
            samples = [(max(float(part.t[i] - part.latency_s[i]), step.start), int(values[i])) for i in at[::every]]
            for t, value in [*samples, (step.end, idle)] if samples else ():
                yield {"ph": "C", "ts": t, "pid": pid, "tid": 0, "name": name, "args": {name: value}}


def _slice(pid: int, tid: int, name: str, start: float, end: float, args: Mapping[str, Any]) -> ChromeEvent:
    return {"ph": "X", "ts": start, "dur": end, "pid": pid, "tid": tid, "name": name, "args": dict(args)}
