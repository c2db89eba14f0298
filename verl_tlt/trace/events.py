"""The event log of a run: one JSON object per line, one file per process.

Each line carries `t` (unix seconds, when it was written) and `kind`; its other keys are the fields of the dataclass of
that kind below. Engine steps have no kind: they go to `engine-<replica>.jsonl` (`speculation.step_control.StepTrace`).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic_core import to_json

from verl_tlt.messages.rollout import DrafterStatus
from verl_tlt.messages.training import SessionResult, Verdict

logger = logging.getLogger(__name__)

ENGINE_PREFIX = "engine-"
"""Files whose names begin with this hold engine steps; the rest of the name is the replica."""

Kind = Literal["run", "phase", "load", "session", "publish", "reload", "stopped", "step"]

TRAINER_DEVICE = "trainer's device"
"""Beginning of the name of a trainer's device, which stands for a replica where none is colocated."""


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """The run started or resumed. What an earlier run wrote of steps from `step0` on no longer counts."""

    kind: ClassVar[str] = "run"
    t: float
    step0: int
    """First RL step of this run; 1 unless resumed."""
    replicas: Sequence[str] = ()
    """Names of the rollout replicas, as in every other event."""
    standalone: Sequence[str] = ()
    """Replicas on devices of their own, where the policy is never trained (`separate_async`)."""
    gpus: int = 0
    """GPU workers of the job."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """`TLTConfig.to_dict()`."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed versions by distribution."""
    policy: str = ""
    """Where the policy was loaded from."""
    name: str = ""
    """Project and experiment, as verl's logger has them."""
    hardware: str = ""
    """Kinds of GPU of Ray's cluster, or the driver's CPU cores."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One part of the trainer's step, written when it ended."""

    kind: ClassVar[str] = "phase"
    t: float
    step: int
    name: str
    """rollout, reward, cold_start, old_log_prob, update_actor or update_weights."""
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class LoadSample:
    """Requests in flight by replica from `t` on, written once a second and when a replica becomes idle or busy.

    With more than 16 replicas it is written more rarely.
    """

    kind: ClassVar[str] = "load"
    t: float
    step: int
    inflight: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Session(SessionResult):
    """One training session on a replica, written when the rollout has ended."""

    kind: ClassVar[str] = "session"
    t: float
    step: int
    replica: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Publish(Verdict):
    """What became of the candidate."""

    kind: ClassVar[str] = "publish"
    t: float
    step: int
    version: int
    """The version that all engines serve from now on."""


@dataclass(frozen=True, kw_only=True)
class Reload(DrafterStatus):
    """What a replica serves after a weight sync; `ok` is False where it is not the version it was asked to load."""

    kind: ClassVar[str] = "reload"
    t: float
    step: int
    replica: str


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Speculation was disabled because it does not pay, or enabled again."""

    kind: ClassVar[str] = "stopped"
    t: float
    step: int
    """The RL step after whose rollout this happened."""
    cause: str
    """Why; empty: it goes on again."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The metrics of one RL step, under the names in the trainer's logger (`tlt/*`, `timing_s/*`, ...)."""

    kind: ClassVar[str] = "step"
    t: float
    step: int
    metrics: Mapping[str, float]
    off: str = ""
    """Why no replica drafted in its rollout; empty: one did."""


Event = RunStarted | Phase | LoadSample | Session | Publish | Reload | Stopped | Step
EVENT_TYPES: dict[str, type[Event]] = {cls.kind: cls for cls in get_args(Event)}


class TraceWriter:
    """Appends events to `<directory>/<name>.jsonl`; threads may share one.

    A failure to write is counted and the first one logged: the run goes on. Every line is one `write` to an append-only
    descriptor, so a killed process leaves at worst half a line, which the reader skips.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(directory) / f"{name}.jsonl"
        self.failures = 0
        """Lines that could not be written (`tlt/errors_trace`)."""
        self._clock = clock
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._torn = False  # a full disk took a part of the last line
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")
        except OSError as error:
            self._fail(f"cannot write the trace {self.path}: {error}")

    def emit(self, kind: Kind, **fields: object) -> None:
        self.write({"t": self._clock(), "kind": kind, **fields})

    def add(self, event: Event) -> None:
        """Write an event with the time that it holds; fields that are None are left out."""
        fields = {name: value for name, value in vars(event).items() if value is not None}
        self.write({"kind": event.kind, **fields})

    def write(self, record: Mapping[str, object]) -> None:
        """Write one record as it is; engine steps have their own `t`."""
        try:
            line = to_json(record, inf_nan_mode="null", fallback=_plain) + b"\n"
            with self._lock:
                if self._fd is None:
                    raise OSError("the file is not open")
                if self._torn:  # so that the reader skips the part, and not this line
                    line = b"\n" + line
                written = os.write(self._fd, line)
                self._torn = written < len(line)
            if written < len(line):
                raise OSError(f"of its {len(line)} bytes {written} were written")
        except Exception as error:  # the run goes on, whatever the record holds
            self._fail(f"lost a line of the trace {self.path}: {error}")

    def _fail(self, message: str) -> None:
        with self._lock:
            self.failures += 1
            first = self.failures == 1
        if first:
            logger.warning("%s (further failures of this trace file are only counted)", message)


def _plain(value: object) -> object:
    """What JSON can hold for an array or scalar of numpy or torch, or another mapping; else its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)
