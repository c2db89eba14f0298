"""What ran when in one RL step: its rollout, the other phases, training of the drafter, batch and draft length."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_tlt.commands.report.reader import RunTrace, TraceError
from verl_tlt.trace.events import Phase, Session

Ints = npt.NDArray[np.int64]
NO_STEP = -2
"""Stand-in for the draft length at a time when the engine ran no step; OFF is -1."""
GAP_S = 0.1
"""Seconds between two engine steps that are no pause."""


@dataclass(frozen=True)
class RLStep:
    """What a trace holds of one RL step; its rollout ran from `start` to `end` (unix seconds).

    With several waits for samples (`separate_async`) that is from the first one to the last.
    """

    step: int
    start: float
    end: float
    rollout_s: float
    """Seconds of the rollout; of several waits their sum."""
    others: Sequence[Phase] = ()
    """The phases that are no rollout, in the order of time."""
    sessions: Sequence[Session] = ()

    @property
    def finish(self) -> float:
        return max([self.end, *(p.end for p in self.others)])


def rl_steps(trace: RunTrace) -> dict[int, RLStep]:
    """Every step with a finished rollout, ascending, several of one step as one; a `TraceError` where there is none."""
    phases: defaultdict[int, list[Phase]] = defaultdict(list)
    sessions: defaultdict[int, list[Session]] = defaultdict(list)
    for phase in trace.phases:
        phases[phase.step].append(phase)
    for session in trace.sessions:
        sessions[session.step].append(session)
    steps = {}
    for step in sorted(phases):
        if rollouts := [p for p in phases[step] if p.name == "rollout"]:
            start, end = min(p.start for p in rollouts), max(p.end for p in rollouts)
            rollout_s = sum(p.end - p.start for p in rollouts)
            others = [p for p in phases[step] if p.name != "rollout" and p.end > start]
            steps[step] = RLStep(step, start, end, rollout_s, others, sessions[step])
    if not steps:
        raise TraceError(f"{trace.directory} holds no finished rollout yet.")
    return steps


def most_trained(steps: Mapping[int, RLStep]) -> int:
    """The RL step with the most training within its rollout; without any, the one with the longest rollout."""

    def training_and_rollout_s(number: int) -> tuple[float, float]:
        step = steps[number]
        training_s = sum(max(0.0, min(session.end, step.end) - session.start) for session in step.sessions)
        return training_s, step.end - step.start

    return max(steps, key=training_and_rollout_s)


def decodes_until(trace: RunTrace, step: RLStep, replica: str) -> float:
    """Unix seconds up to which a replica is drawn: a standalone one decodes on after the rollout.

    Without files of engine steps the load is known during the rollout only.
    """
    standalone = trace.run is not None and replica in trace.run.standalone
    return step.finish if standalone and trace.engine_files else step.end


def sampled(trace: RunTrace, step: RLStep, replica: str, at: npt.NDArray[np.float64]) -> tuple[Ints, Ints]:
    """A replica's batch and draft length (-1: OFF, `NO_STEP`: no engine step) at the unix seconds `at` of a step.

    Without a file of engine steps the batch is the requests in flight.
    """
    until = decodes_until(trace, step, replica)
    part = trace.engine(replica, step.start, until)
    if not part.t.size:
        loads = [load for load in trace.loads if load.step == step.step]
        counts = np.array([0, *(load.inflight.get(replica, 0) for load in loads)], dtype=np.int64)
        batch = counts[np.searchsorted([load.t for load in loads], at, side="right")]
        k = np.full(len(at), NO_STEP)
    else:
        i = np.searchsorted(part.t, at).clip(max=part.t.size - 1)
        ran = (part.t[i] - part.latency_s[i] - GAP_S <= at) & (at <= part.t[i])
        batch, k = np.where(ran, part.batch[i], 0), np.where(ran, part.k[i], NO_STEP)
    return np.where(at <= until, batch, 0), k
