"""A cold start: a run without a drafter stops once, and trains one on all devices before it goes on.

It saves what drafting saves in as many steps as bubbles would need to teach as much, or as are left. It trains in
portions, each judged by the gate in the next one. Merge, gate and publication are those of every session.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest

from verl_tlt.trace.events import Session
from verl_tlt.trainer.drafter_update import DrafterUpdate
from verl_tlt.trainer.waits import Deadline

logger = logging.getLogger(__name__)

STEPS = 2
"""RL steps whose hidden states a cold start needs. Fewer hold too little: a head memorises what it trains on, and with
less than some ten held-out sequences the gate hardly ever decides."""
SHARE = 0.01
"""Longest cold start, as a share of the time that the run has left, where the user sets none."""
LONGEST_S = 300.0
"""Longest cold start of a long run, in seconds: it has then passed many times over two steps' hidden states."""
SHORTEST_S = 10.0
"""Shortest useful cold start, in seconds: moving, scoring and merging would take most of a shorter one."""
PORTIONS = 5
"""Number of training portions, about; a portion ends early when its passes over the buffer are used up."""
SCORES_SHARE = 0.25
"""Largest share of a portion that its scores may take; where they took more, the next one is longer."""
FLAT = 2
"""Portions over which the rise of acceptance is averaged; as many that taught nothing end the cold start."""
BEST = (0.8,) * 16
"""Conditional acceptance by draft position of a good drafter: no cold start makes a better one."""

Saving = Callable[[Sequence[float]], float]
"""Share of a rollout's time that drafting saves, by a drafter's conditional acceptance; 0: none, or unknown."""


class ColdStart:
    """Decides when a run's one cold start begins, if it is `wanted`, and when it ends: a pure state machine.

    With `longest_s` a cold start takes so many seconds at most, and begins whatever it may save. With None the run's
    length bounds it, and it begins where it may pay.
    """

    def __init__(self, wanted: bool, longest_s: float | None) -> None:
        self.wanted = wanted and longest_s != 0.0
        """The cold start is still to come."""
        self.portion_s = 0.0
        self.news: dict[str, float] = {}
        """Metrics of the cold start's step: the seconds it is expected to save, and in how many steps."""
        self._longest_s = longest_s
        self._steps = self._steps_left = 0
        self._step_s = self._rollout_s = self._bubble_s = 0.0
        self._fruitless = 0
        self._verdicts: list[Sequence[float]] = [()]  # conditional acceptance of what was served after each portion

    @property
    def judging_s(self) -> float:
        """Seconds kept for judging what the last portion brought."""
        return self.portion_s * SCORES_SHARE

    def stepped(self, step_s: float, rollout_s: float, bubble_s: float = 0.0) -> None:
        """An RL step has ended: its seconds, those of its rollout (0: unknown), and of a replica's bubble in that."""
        # The first has everything used for the first time.
        self._step_s = min(step_s, self._step_s) if self._steps else step_s
        self._rollout_s, self.news = rollout_s, {}
        self._steps += 1
        self._bubble_s += (bubble_s - self._bubble_s) / self._steps

    def due(self) -> bool:
        """Whether the cold start may begin, after the coming rollout at the latest."""
        return self.wanted and self._steps >= STEPS

    def begin(self, steps_left: int, saving: Saving) -> float:
        """Seconds that the cold start may take; 0: it would not pay. Called once in a run."""
        self.wanted, self._steps_left, seconds = False, steps_left, self._longest_s
        if seconds is None:
            seconds = min(SHARE * steps_left * self._step_s, LONGEST_S)
            saves_s = self._saves_s(saving(BEST), seconds)
            logger.info("TLT: a cold start of %.0f s would save %.0f s at best", seconds, saves_s)
            seconds = seconds if seconds >= SHORTEST_S and saves_s > seconds else 0.0
        self.portion_s = seconds / PORTIONS
        return seconds

    def _steps_ahead(self, trained_s: float) -> float:
        """RL steps whose bubbles would hold so many seconds of training; at most those that are left."""
        return min(self._steps_left, trained_s / self._bubble_s) if self._bubble_s > 0.0 else self._steps_left

    def _saves_s(self, share: float, trained_s: float) -> float:
        return share * self._rollout_s * self._steps_ahead(trained_s)

    def scored(self, seconds: float) -> None:
        """The scores of a portion took so many seconds, or were not done when it ended after as many."""
        self.portion_s = max(self.portion_s, seconds / SCORES_SHARE)

    def trained(self, merged: bool, update: DrafterUpdate | None) -> None:
        """A portion is over; `merged`: somebody trained a step in it, and that was merged. `update` has the verdict."""
        self._fruitless = 0 if merged else self._fruitless + 1
        if update is not None and update.acceptance:
            self._verdicts.append(update.acceptance)

    def enough(self, spent_s: float, left_s: float, saving: Saving) -> str:
        """Why the cold start ends after `spent_s` seconds, with `left_s` to go; empty: it goes on."""
        if self._fruitless >= FLAT:
            return "nothing was trained and merged in two portions"
        recent = self._verdicts[-1 - FLAT :]
        before, now, portions = recent[0], recent[-1], len(recent) - 1
        if not portions:
            return ""
        saves_now = saving(now)
        for n in range(1, max(1, round(left_s / self.portion_s)) + 1):
            rises = (1.0 - 0.5**n) / portions  # each portion adds half of what the one before it did
            ahead = [min(1.0, max(0.0, a + rises * (a - b))) for a, b in zip_longest(now, before, fillvalue=0.0)]
            adds_s = self._saves_s(saving(ahead) - saves_now, spent_s + n * self.portion_s)
            if adds_s > n * self.portion_s:
                return ""
        return f"drafting saves {saves_now:.0%} of a rollout now, and more training would not bring back its time"

    def ended(self, seconds: float, saving: Saving) -> None:
        """The cold start took so many seconds: note in `news` what it is expected to save."""
        steps = max(1, round(self._steps_ahead(seconds)))
        expected_s = saving(self._verdicts[-1]) * self._rollout_s * steps
        self.news = {"tlt/cold_start_expected_s": expected_s, "tlt/cold_start_steps": steps}
        logger.info("TLT: it took %.0f s, and is expected to save %.0f s in %d steps", seconds, expected_s, steps)


def train_in_portions(
    rule: ColdStart,
    deadline: Deadline,
    train: Callable[[float], Sequence[Session]],
    learn: Callable[[Sequence[Session], float], DrafterUpdate | None],
    saving: Saving,
) -> str:
    """Train until the rule, which has begun, has enough or the time is over; returns why it ended.

    `train`: all spot workers, for at most so many seconds. `learn`: judge what was merged before these sessions, and
    merge them, within so many seconds; None: it is late.
    """
    left, late_s, total_s = deadline.left, rule.portion_s, deadline.left()
    logger.info("TLT: cold start: RL waits up to %.0f s while the spot workers train a drafter", total_s)
    why = ""
    while not why and left() > 2 * rule.judging_s:
        sessions = train(min(rule.portion_s, left() - rule.judging_s))
        rule.scored(max((session.judged_s for session in sessions), default=0.0))
        stepped = any(session.steps for session in sessions)
        # Told to stop before its first step, it had enough to train on, and too little time.
        if not stepped and not any(session.outcome == "stopped" for session in sessions):
            why = "no spot worker could train"
        elif (update := learn(sessions, max(late_s, left()))) is None:
            why = "a merge is late"
        else:
            rule.trained(stepped and not update.failure, update)
            why = rule.enough(total_s - left(), left(), saving)
    if not why:  # judge what the last portion brought
        why = "its time is over"
        rule.trained(True, learn(train(left()), late_s))
    logger.info("TLT: the cold start is over: %s", why)
    rule.ended(total_s - left(), saving)
    return why
