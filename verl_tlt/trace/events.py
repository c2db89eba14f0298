"""The event log: what every part of a run writes down, one JSON object a line, one file per process.

Each line carries `t` (unix seconds, when it was written) and `kind`. The dataclasses below are the whole vocabulary:
their fields are the keys of the line. Engine steps are the exception: a scheduler writes thousands of them, so they go
to `engine-<replica>.jsonl` as bare records without a kind (`engine_core.step_trace`). Writing must never disturb the
run: a `TraceWriter` counts its failures instead of raising them. Standard library only, so any process can afford it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from verl_tlt.ownership import open_to_append

logger = logging.getLogger(__name__)

ENGINE_PREFIX = "engine-"
"""Files with this prefix hold engine steps; the rest of the name is the replica's."""

PhaseName = Literal[
    "rollout",
    "reward",
    "old_log_prob",
    "update_actor",
    "update_weights",
    "merge",
    "publish",
    "reload",
    "save",
    "validate",
]
Decision = Literal["published", "kept", "reverted"]


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """The run began (again, after a resume). Steps from `step0` on that an earlier run wrote are void."""

    kind: ClassVar[str] = "run"
    t: float
    step0: int
    """First RL step of this run; 1 unless resumed."""
    mode: Literal["tlt", "stock"] = "tlt"
    replicas: Sequence[str] = ()
    """Names of the rollout replicas, as every other event spells them."""
    standalone: Sequence[str] = ()
    """Those of them on devices of their own, where the policy is never trained (`separate_async`)."""
    gpus: int = 0
    """GPU workers of the job."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """`TLTConfig.to_dict()`."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed versions by distribution."""
    policy: str = ""
    """Where the policy was loaded from: what the drafter is served with."""
    drafter: str = ""
    """Directory in which the run keeps its latest servable drafter."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of the driver's step, written when it ended."""

    kind: ClassVar[str] = "phase"
    t: float
    step: int
    name: PhaseName
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class LoadSample:
    """Requests in flight by replica from `t` on, written when they changed: at most about 20 times a second, and less
    often where there are more than a hundred replicas.
    """

    kind: ClassVar[str] = "load"
    t: float
    step: int
    inflight: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Idle:
    """A replica had nothing left to decode from `start` until the end of the step's rollout: a bubble."""

    kind: ClassVar[str] = "idle"
    t: float
    step: int
    replica: str
    start: float


@dataclass(frozen=True, kw_only=True)
class Session:
    """One training session of a spot worker, written when it ended."""

    kind: ClassVar[str] = "session"
    t: float
    step: int
    replica: str
    worker: int | str
    start: float
    end: float
    steps: int
    """Optimizer steps."""
    tokens: int
    """Tokens trained on."""
    outcome: Literal["stopped", "exhausted", "failed"]
    """Stopped by the end of sampling, out of data worth another epoch, or raised."""
    epochs: float = 0.0
    loss_last: float | None = None
    acc: Sequence[float] = ()
    """Share of training positions whose draft i was the target's most likely token, at the session's end."""
    skipped: int = 0
    """Optimizer steps skipped for a non-finite loss or gradient."""
    slowest_s: float | None = None
    """Seconds of its longest micro-batch, which a stop may have to wait for."""
    judged_s: float = 0.0
    """Seconds in which it scored the candidate, before it trained."""
    stop_latency_s: float | None = None
    """Seconds from the stop request to its acknowledgement."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Publish:
    """What became of the merged drafter of a step."""

    kind: ClassVar[str] = "publish"
    t: float
    step: int
    version: int
    """The version every engine should serve from here on."""
    decision: Decision
    reason: str = ""
    """Why, in words: the gate's verdict, or what kept it from judging."""
    gain: float | None = None
    """The candidate's held-out accept length relative to the served drafter's, minus one; None: not judged."""
    gain_low: float | None = None
    """Lower end of the gate's interval around `gain`."""
    tau: Mapping[str, float | None] = field(default_factory=dict)
    """Simulated accept length on held-out positions of `candidate`, `served` and `initial`; absent when not judged."""
    seconds: float = 0.0
    """Time on the critical path."""
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Reload:
    """One replica loaded a drafter, and what it reported back."""

    kind: ClassVar[str] = "reload"
    t: float
    step: int
    replica: str
    version: int
    fingerprint: str
    ok: bool
    """False: not the version or fingerprint asked for; the replica runs without speculation."""
    seconds: float = 0.0
    full_graphs: Sequence[int] | None = None
    """Draft lengths whose steps have FULL CUDA graphs; None: nothing is captured there."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Speculation was stopped because it does not pay, or goes on again."""

    kind: ClassVar[str] = "stopped"
    t: float
    step: int
    """The RL step after whose rollout."""
    cause: str
    """The likely cause; empty: it goes on, since a replica that tried gained time."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One RL step is over: its metrics under the names the trainer's logger uses (`tlt/*`, `timing_s/*`, ...)."""

    kind: ClassVar[str] = "step"
    t: float
    step: int
    metrics: Mapping[str, float]


Event = RunStarted | Phase | LoadSample | Idle | Session | Publish | Reload | Stopped | Step
EVENT_TYPES: dict[str, type[Event]] = {
    cls.kind: cls for cls in (RunStarted, Phase, LoadSample, Idle, Session, Publish, Reload, Stopped, Step)
}


def required_fields(cls: type[Any]) -> frozenset[str]:
    """Keys a line of this kind cannot be read without; `t` is the writer's."""
    no_default = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return frozenset(f.name for f in fields if f.default is no_default and f.default_factory is no_default) - {"t"}


_REQUIRED = {kind: required_fields(cls) for kind, cls in EVENT_TYPES.items()}


class TraceWriter:
    """Appends events to `<directory>/<name>.jsonl`; safe to share between threads, one writer per process and name.

    Every line is one `write` to an append-only descriptor: a killed process loses nothing it wrote, and at worst leaves
    half a line, which the next writer closes off and the reader skips.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str, clock: Callable[[], float] = time.time) -> None:
        """Open the file; a directory that cannot be written is a counted failure, not an exception."""
        self.path = Path(directory) / f"{name}.jsonl"
        self.failures = 0
        """Lines lost or malformed; the first is logged."""
        self._clock = clock
        self._lock = threading.Lock()
        self._fd: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_to_append(self.path)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")
        except OSError as error:
            self._fail(f"cannot write the trace {self.path}: {error}")

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event now. Unknown kinds and missing fields are written all the same, and counted."""
        if kind not in _REQUIRED:
            self._fail(f"trace event kind {kind!r} is not one of {', '.join(_REQUIRED)}")
        elif missing := _REQUIRED[kind] - fields.keys():
            self._fail(f"trace event {kind!r} lacks {', '.join(sorted(missing))}")
        self.write({"t": self._clock(), "kind": kind, **fields})

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record as it is (engine steps bring their own `t`)."""
        try:
            line = _encode(record)
            with self._lock:
                if self._fd is None:
                    raise OSError("the file is not open")
                os.write(self._fd, line)
        except Exception as error:  # whatever a caller hands over, the run must go on
            self._fail(f"lost a line of the trace {self.path}: {error}")

    def close(self) -> None:
        """Close the file; later events count as failures."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _fail(self, message: str) -> None:
        with self._lock:
            self.failures += 1
            first = self.failures == 1
        if first:
            logger.warning("%s (further failures of this trace file are only counted)", message)


def _encode(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, default=_plain, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a NaN or infinity somewhere: JSON has none, so it becomes null
        text = json.dumps(_finite(json.loads(json.dumps(record, default=_plain))), separators=(",", ":"))
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """Arrays and scalars of numpy and torch, mappings that are no dict, paths."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
