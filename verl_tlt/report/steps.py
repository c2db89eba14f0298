"""A trace by RL step: what belongs to one step, and what it saved. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from verl_tlt.report.reader import EngineSteps, RunTrace, TraceError
from verl_tlt.trace.events import Idle, LoadSample, Phase, Publish, Reload, Session

E = TypeVar("E", Phase, LoadSample, Idle, Session, Reload)
Ints = npt.NDArray[np.int64]

IDLE_ENGINE = -2
"""In place of a draft length where the engine ran no step; OFF is -1."""
GAP_S = 0.1
"""Seconds between two engine steps that count as no pause: an engine has work between its steps."""


@dataclass(frozen=True)
class Bubble:
    """A replica had nothing to decode from `start` to `end` (unix seconds), while another still did."""

    replica: str
    start: float
    end: float


@dataclass(frozen=True)
class RLStep:
    """All that a trace holds of one RL step; `start` and `end` (unix seconds) are its rollout's."""

    step: int
    start: float
    end: float
    after: Sequence[Phase] = ()
    """What followed the rollout, in the order of time."""
    loads: Sequence[LoadSample] = ()
    bubbles: Sequence[Bubble] = ()
    sessions: Sequence[Session] = ()
    publish: Publish | None = None
    reloads: Sequence[Reload] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Empty for a step that is not over."""

    @property
    def finish(self) -> float:
        """Unix seconds at which its last phase ended."""
        return max([self.end, *(p.end for p in self.after)])


@dataclass(frozen=True)
class Saving:
    """Seconds that one step gained and lost."""

    step: int
    saved_s: float | None
    """By which drafting ended the rollout before stock would have, negative: after; None: not measured."""
    work_s: float
    """TLT's own work on the critical path, beyond what `saved_s` has counted already."""

    @property
    def net_s(self) -> float | None:
        """Saved less own work; None where nothing says what was saved."""
        return None if self.saved_s is None else self.saved_s - self.work_s


def rl_steps(trace: RunTrace) -> dict[int, RLStep]:
    """Every step with a finished rollout, ascending. Where a step sampled more than once, from first start to last end.

    Raises:
        TraceError: no rollout was traced.
    """
    phases = _by_step(trace.phases)
    rollouts = {s: [p for p in found if p.name == "rollout"] for s, found in phases.items()}
    rollouts = {s: found for s, found in rollouts.items() if found}
    if not rollouts:
        raise TraceError(f"{trace.directory} holds no finished rollout to draw.")
    loads, idles, sessions = _by_step(trace.loads), _by_step(trace.idles), _by_step(trace.sessions)
    reloads, publishes = _by_step(trace.reloads), {p.step: p for p in trace.publishes}
    steps = {}
    for step, sampled in sorted(rollouts.items()):
        end = max(p.end for p in sampled)
        steps[step] = RLStep(
            step,
            min(p.start for p in sampled),
            end,
            after=[p for p in phases[step] if p.name != "rollout" and p.end > end],
            loads=loads[step],
            bubbles=[
                Bubble(i.replica, i.start, min((p.end for p in sampled if p.end >= i.start), default=end))
                for i in idles[step]
            ],
            sessions=sessions[step],
            publish=publishes.get(step),
            reloads=reloads[step],
            metrics=trace.steps.get(step, {}),
        )
    return steps


def saving(step: int, metrics: Mapping[str, float]) -> Saving:
    """From a step's metrics. What engine steps waited for the controller is in their seconds, thus in `saved_s`."""
    saved, work = metrics.get("tlt/saved_s"), metrics.get("tlt/overhead_s", 0.0)
    counted = 0.0 if saved is None else metrics.get("tlt/overhead_control_s", 0.0)
    return Saving(step, saved, work - counted)


def most_trained(steps: Mapping[int, RLStep]) -> int:
    """The RL step with the most training in its bubble; without any, the one with the longest rollout."""
    trained = {s: sum(x.end - x.start for x in step.sessions) for s, step in steps.items()}
    best = max(trained, key=lambda s: trained[s])
    return best if trained[best] > 0 else max(steps, key=lambda s: steps[s].end - steps[s].start)


def sampled_load(step: RLStep, replica: str, at: npt.NDArray[np.float64]) -> Ints:
    """Requests in flight on a replica at the unix seconds `at`, from the rollout's load samples."""
    if not step.loads:
        return np.zeros(len(at), dtype=np.int64)
    counts = np.array([0, *(load.inflight.get(replica, 0) for load in step.loads)], dtype=np.int64)
    return counts[np.searchsorted([load.t for load in step.loads], at, side="right")]


def sampled_engine(engine: EngineSteps, at: npt.NDArray[np.float64]) -> tuple[Ints, Ints]:
    """Batch and draft length of the engine step that ran at each of the unix seconds `at`; without one, 0 and -2."""
    if not engine.t.size:
        return np.zeros(len(at), dtype=np.int64), np.full(len(at), IDLE_ENGINE)
    i = np.searchsorted(engine.t, at)
    ran = i < engine.t.size
    i = np.minimum(i, engine.t.size - 1)
    ran &= engine.t[i] - engine.latency_s[i] - GAP_S <= at
    return np.where(ran, engine.batch[i], 0), np.where(ran, engine.k[i], IDLE_ENGINE)


def _by_step(events: Iterable[E]) -> defaultdict[int, list[E]]:
    found: defaultdict[int, list[E]] = defaultdict(list)
    for event in events:
        found[event.step].append(event)
    return found
