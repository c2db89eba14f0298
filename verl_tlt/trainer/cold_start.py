"""A cold start: a run without a drafter stops once, and trains one on all devices before it goes on.

Bubbles alone teach a random head within tens of steps, in which nothing is saved. A cold start trains in portions;
before each of them, and once more in the end, the gate judges what the one before it brought. It ends when that is no
more than noise, when another portion would not bring back its own time, or when its seconds are used up. Merge, gate
and publication are those of every other session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from verl_tlt.trainer.drafter_update import DrafterUpdate
from verl_tlt.trainer.waits import Deadline
from verl_tlt.trainer.watch import EndedSession

logger = logging.getLogger(__name__)

STEPS = 2
"""Steps whose hidden states are there when it begins. Fewer hold too little: a head memorises what it trains on, and
with less than some ten held-out sequences the gate hardly ever decides."""
SHARE = 0.01
"""Longest cold start, as a share of the run's time that is left, where nobody has said how long."""
LONGEST_S = 300.0
"""Longest cold start of a long run, in seconds: it has then passed many times over two steps' hidden states."""
SHORTEST_S = 10.0
"""Shortest useful cold start, in seconds: moving, scoring and merging would take most of a shorter one."""
PORTIONS = 5
"""Number of training portions, about; a portion ends early when its passes over the buffer are used up."""
SCORES_SHARE = 0.25
"""Largest share of a portion that its scores may take; where they took more, the next one is longer."""
FLAT = 2
"""Portions in a row that did not surely raise the accept length, or taught nothing at all, after which it ends."""
PAYS_WITHIN = 10
"""RL steps in which a portion must bring back its time; in more of them bubbles would have taught as much."""


class ColdStart:
    """When the one cold start of a run comes, if it is `wanted`, and ends: a pure state machine.

    It takes `longest_s` seconds at most (None: by the run's length).
    """

    def __init__(self, wanted: bool, longest_s: float | None) -> None:
        self.wanted = wanted and longest_s != 0.0
        """It is still ahead."""
        self.portion_s = 0.0
        self._longest_s = longest_s
        self._steps = self._steps_left = 0
        self._step_s = self._rollout_s = 0.0
        self._flat = self._fruitless = 0
        self._saving = self._rise = 0.0

    @property
    def judging_s(self) -> float:
        """Seconds kept for judging what the last portion brought."""
        return self.portion_s * SCORES_SHARE

    def stepped(self, step_s: float, rollout_s: float) -> None:
        """An RL step has ended that took `step_s` seconds, `rollout_s` of them in its rollout (0: unknown)."""
        # The first has everything used for the first time.
        self._step_s = min(step_s, self._step_s) if self._steps else step_s
        self._rollout_s = rollout_s
        self._steps += 1

    def due(self) -> bool:
        """Whether it may begin, after the coming rollout at the latest."""
        return self.wanted and self._steps >= STEPS

    def begin(self, steps_left: int) -> float:
        """Seconds that it may take; 0: the steps that are left do not make up for it. It is not asked again."""
        self.wanted, self._steps_left = False, steps_left
        seconds = self._longest_s
        if seconds is None:
            seconds = min(SHARE * steps_left * self._step_s, LONGEST_S)
            seconds = seconds if seconds >= SHORTEST_S else 0.0
        self.portion_s = seconds / PORTIONS
        return seconds

    def scored(self, seconds: float) -> None:
        """The scores of a portion took so many seconds, or were not done when it ended after as many."""
        self.portion_s = max(self.portion_s, seconds / SCORES_SHARE)

    def trained(self, merged: bool) -> None:
        """A portion is over; `merged`: somebody trained a step in it, and that was merged."""
        self._fruitless = 0 if merged else self._fruitless + 1

    def judged(self, rose: bool, saving: float) -> None:
        """The gate has judged a portion.

        `rose`: the accept length surely did; `saving`: share of a rollout that drafting with what is served now is
        expected to save, 0 where it does not pay or nobody knows.
        """
        self._flat = 0 if rose else self._flat + 1
        self._rise, self._saving = saving - self._saving, saving

    def enough(self) -> str:
        """Why it ends; empty: it goes on."""
        if self._fruitless >= FLAT:
            return "nothing was trained and merged in two portions"
        if self._flat >= FLAT:
            return "the accept length does not rise any more"
        back_s = self._rise * self._rollout_s * min(self._steps_left, PAYS_WITHIN)
        if self._saving > 0.0 and back_s <= self.portion_s:
            return f"drafting pays, and more training would not within {PAYS_WITHIN} steps"
        return ""


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
