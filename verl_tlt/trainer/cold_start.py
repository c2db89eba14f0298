"""A cold start carried out: portions of training on all devices, each watched as a bubble's sessions are.

`idle.cold_start` decides how long; merge, gate and publication are those of every other session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl_tlt.config import SpotConfig, TLTConfig
from verl_tlt.idle.cold_start import ColdStart
from verl_tlt.idle.modes import ModeRule
from verl_tlt.idle.trainer_idle import TrainerIdlePlanner
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.clock import Clock, Deadline
from verl_tlt.trainer.drafter_update import DrafterUpdate
from verl_tlt.trainer.run_setup import FirstDrafter
from verl_tlt.trainer.watch import EndedSession, PendingWork, PhaseReport, SamplingWatch

if TYPE_CHECKING:
    from verl_tlt.trainer.ray_fleet import RayFleet

logger = logging.getLogger(__name__)


def make_cold_start(tlt: TLTConfig, start: FirstDrafter, mode: ModeRule) -> ColdStart:
    """The cold start of a run: wanted where an untrained head is to draft, and its engines sleep while RL waits."""
    drafts = tlt.speculation.enable and tlt.speculation.policy != "off" and tlt.speculation.source != "ngram"
    return ColdStart(start.untrained and drafts and mode.idle == "replicas", tlt.spot.cold_start_s)


def train_in_portions(
    rule: ColdStart,
    deadline: Deadline,
    train: Callable[[float], Sequence[EndedSession]],
    learn: Callable[[Sequence[EndedSession], float], DrafterUpdate | None],
    saving: Callable[[Sequence[float]], float],
) -> str:
    """Train until the rule has enough or the time is over; returns which, in words.

    Args:
        rule: that has begun.
        deadline: its seconds.
        train: all spot workers, for at most so many seconds.
        learn: judge what was merged before these sessions, and merge them, within so many seconds; None: it is late.
        saving: share of a rollout that drafting saves by a drafter's conditional acceptance (`ColdStart.judged`).
    """
    left, late_s = deadline.left, rule.portion_s
    logger.info("TLT: cold start: RL waits up to %.0f s while the spot workers train a drafter", left())
    why = ""
    while not why and left() > 2 * rule.judging_s:
        sessions = train(min(rule.portion_s, left() - rule.judging_s))
        rule.scored(max((session.result.judged_s for session in sessions), default=0.0))
        stepped = any(session.result.steps for session in sessions)
        # Told to stop before its first step, it had enough to train on, and too little time.
        if not stepped and not any(session.result.outcome == "stopped" for session in sessions):
            why = "no spot worker could train"
        elif (update := learn(sessions, max(late_s, left()))) is None:
            why = "a merge is late"
        else:
            rule.trained(stepped and not update.failure)
            if update.tau:
                rule.judged(rose(update), saving(update.acceptance))
            why = rule.enough()
    if not why:  # judge what the last portion brought
        why = "its time is over"
        learn(train(left()), late_s)
    logger.info("TLT: the cold start is over: %s", why)
    return why


def rose(update: DrafterUpdate) -> bool:
    """Whether a scored candidate is surely better than what is served; where nothing is sure, whether it looks so."""
    unsure = update.tau["candidate"] / update.tau["served"] - 1.0
    return (unsure if update.gain_low is None else update.gain_low) > 0.0


def train_together(
    fleet: RayFleet, names: Sequence[str], seconds: float, spot: SpotConfig, trace: TraceWriter, step: int, clock: Clock
) -> PhaseReport:
    """One session of so many seconds at most on each of these replicas, none of which serves requests."""
    planner = TrainerIdlePlanner(names, begin=clock.time(), settle_s=0.0, spot_workers=names)
    watch = SamplingWatch(fleet, planner, PendingWork, spot.poll_s, trace, step, clock=clock)
    watch.wait(seconds)
    return watch.finish(spot.stop_timeout_s)
