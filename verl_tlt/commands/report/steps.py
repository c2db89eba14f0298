"""Groups a trace by RL step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from verl_tlt.commands.report.reader import RunTrace, TraceError
from verl_tlt.trace.events import Idle, Phase, Session

E = TypeVar("E", Phase, Idle, Session)
Ints = npt.NDArray[np.int64]

NO_STEP = -2
"""Stands for the draft length at a time when the engine ran no step; OFF is -1."""
GAP_S = 0.1
"""Seconds between two engine steps that are no pause."""


@dataclass(frozen=True)
class Bubble:
    """A replica had nothing to decode from `start` to `end` (unix seconds) while another still decoded."""

    replica: str
    start: float
    end: float


@dataclass(frozen=True)
class RLStep:
    """What a trace holds of one RL step; its rollout ran from `start` to `end` (unix seconds)."""

    step: int
    start: float
    end: float
    after: Sequence[Phase] = ()
    """The phases after the rollout, in the order of time."""
    bubbles: Sequence[Bubble] = ()
    sessions: Sequence[Session] = ()

    @property
    def finish(self) -> float:
        """Unix seconds at which its last phase ended."""
        return max([self.end, *(p.end for p in self.after)])


def rl_steps(trace: RunTrace) -> dict[int, RLStep]:
    """Every step with a finished rollout, ascending; several rollouts of one step count as one, with the gaps between.

    A `TraceError` says that there is none.
    """
    phases, idles, sessions = _by_step(trace.phases), _by_step(trace.idles), _by_step(trace.sessions)
    steps = {}
    for step in sorted(phases):
        rollouts = [p for p in phases[step] if p.name == "rollout"]
        if not rollouts:
            continue
        end = max(p.end for p in rollouts)
        steps[step] = RLStep(
            step,
            min(p.start for p in rollouts),
            end,
            after=[p for p in phases[step] if p.name != "rollout" and p.end > end],
            bubbles=[
                Bubble(i.replica, i.start, min((p.end for p in rollouts if p.end >= i.start), default=end))
                for i in idles[step]
            ],
            sessions=sessions[step],
        )
    if not steps:
        raise TraceError(f"{trace.directory} holds no finished rollout to draw.")
    return steps


def most_trained(steps: Mapping[int, RLStep]) -> int:
    """The RL step with the longest sessions; without any, the one with the longest rollout."""
    trained = {n: sum(s.end - s.start for s in step.sessions) for n, step in steps.items()}
    return max(steps, key=lambda n: (trained[n], steps[n].end - steps[n].start))


def sampled(trace: RunTrace, step: RLStep, replica: str, at: npt.NDArray[np.float64]) -> tuple[Ints, Ints]:
    """A replica's batch and draft length (-1: OFF, `NO_STEP`: no engine step) at the unix seconds `at` of a step.

    Without a file of engine steps the batch is the requests in flight.
    """
    engine = trace.engine(replica)
    part = None if engine is None else engine.between(step.start, step.end)
    if part is None or not part.t.size:
        loads = [load for load in trace.loads if load.step == step.step]
        counts = np.array([0, *(load.inflight.get(replica, 0) for load in loads)], dtype=np.int64)
        batch = counts[np.searchsorted([load.t for load in loads], at, side="right")]
        k = np.full(len(at), NO_STEP)
    else:
        i = np.searchsorted(part.t, at).clip(max=part.t.size - 1)
        ran = (part.t[i] - part.latency_s[i] - GAP_S <= at) & (at <= part.t[i])
        batch, k = np.where(ran, part.batch[i], 0), np.where(ran, part.k[i], NO_STEP)
    return np.where(at <= step.end, batch, 0), k


def _by_step(events: Iterable[E]) -> defaultdict[int, list[E]]:
    found: defaultdict[int, list[E]] = defaultdict(list)
    for event in events:
        found[event.step].append(event)
    return found
