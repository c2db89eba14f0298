"""The publish gate: compares a merged drafter with the served and the initial one, and decides whether it is served.

Drafters are compared by accept length at the same held-out positions, because accept length differs far more between
sequences than between drafters. Positions of one sequence resemble each other, and so do the responses to one prompt:
prompts are resampled, each with all of its sequences. Even so a difference of 1 % takes some 10k positions.

* revert where the candidate is surely worse by more than `WORSE` than the better of served and initial;
* publish where it is surely not worse than the served drafter by `margin` or more, and not seen to be worse than the
  initial one;
* hold otherwise: what is served stays, and the candidate trains on.

"Surely" means that a candidate on the wrong side of the border is published (reverted) with a chance of `ERROR` at
most. With too little to judge the decision is hold, unless the served drafter is hardly ever accepted or the candidate
is far better, as at the start of a run, when the drafter learns fastest and little is held out yet.
"""

from typing import Literal, NamedTuple

import numpy as np

from verl_tlt.bootstrap import interval
from verl_tlt.config import GateConfig
from verl_tlt.messages.training import HeldOutScores

Action = Literal["publish", "hold", "revert_served", "revert_initial"]

ERROR = 0.01
"""Chance of a wrong publication or reversion at the border. A candidate is judged anew after every session, and one
lucky verdict publishes: at the usual level of 5 % a run of fifty sessions would have several."""
WORSE = 0.01
"""Share of the accept length by which a candidate must surely be worse to be given up; else it is trained on, and may
become better."""
NOTHING_TO_LOSE = 1.1
"""Below this accept length drafting costs more than it gains nearly anywhere: an unjudged candidate may replace it."""
FAR_BETTER = 0.2
"""Share by which an unjudged candidate must lead: ten standard errors of paired scores at `FEWEST` positions, so that
not even prompts that happen to suit one drafter explain it."""
FEWEST = 128
"""Fewest positions by which a candidate can be `FAR_BETTER`."""
MIN_PROMPTS = 7
"""Fewest prompts to judge by: six all favour one of two equal drafters with a chance above `ERROR` (2^-6 = 1.6 %)."""


class Decision(NamedTuple):
    action: Action
    reason: str
    interval: tuple[float, float] | None
    """Interval around (accept length of the candidate / of the served drafter) - 1; the truth lies beyond either end
    with a chance of `ERROR`. None: not judged."""


def decide(scores: HeldOutScores, config: GateConfig, *, seed: int) -> Decision:
    """Judge the candidate; the same scores and bootstrap `seed` give the same decision."""
    tau = scores.taus()
    best = "initial" if tau["initial"] > tau["served"] else "served"
    back: Action = "revert_initial" if best == "initial" else "revert_served"
    positions, prompts = int(scores.positions.sum()), len(np.unique(scores.prompts[scores.positions > 0]))
    interval: tuple[float, float] | None = None

    def decision(action: Action, reason: str) -> Decision:
        return Decision(action, f"{reason} ({positions} positions of {prompts} held-out prompts)", interval)

    if not np.isfinite(scores.candidate).all():
        return decision(back, "the candidate's scores are not finite")
    if positions < config.min_tokens or prompts < MIN_PROMPTS:
        if tau[best] < NOTHING_TO_LOSE:
            useless = f"the {best} drafter was useless, with an accept length of {tau[best]:.2f}"
            return decision("publish", f"unjudged: {useless}")
        lead = tau["candidate"] / tau[best] - 1.0
        if positions >= FEWEST and lead >= FAR_BETTER:
            return decision("publish", f"unjudged: {lead:.0%} better than the {best} drafter")
        return decision("hold", "too little to judge")

    interval = relative_interval(scores, "served", error=ERROR, seed=seed)
    # The better of two references is partly the luckier one: with two that differ, each gets half the error.
    references = 1 if np.array_equal(scores.served, scores.initial) else 2
    high = relative_interval(scores, best, error=ERROR / references, seed=seed)[1]
    if high < -WORSE:
        return decision(back, f"at least {-high:.2%} worse than the {best} drafter")
    if tau["candidate"] < tau["initial"] * (1.0 - config.margin):
        return decision("hold", f"{1.0 - tau['candidate'] / tau['initial']:.2%} worse than the initial drafter so far")
    if interval[0] > -config.margin:
        return decision("publish", f"within {interval[0]:+.2%} to {interval[1]:+.2%} of the served drafter")
    return decision("hold", f"perhaps {-interval[0]:.2%} worse than the served drafter")


def relative_interval(scores: HeldOutScores, against: str, *, error: float, seed: int) -> tuple[float, float]:
    """Interval of (accept length of the candidate / of `against`) - 1, missed with a chance of `error` on each side."""
    judged = scores.positions > 0
    prompts, prompt_of = np.unique(scores.prompts[judged], return_inverse=True)  # [P]; [S]: index into the former
    candidate, other = scores.of("candidate")[judged], scores.of(against)[judged]  # [S, 1+K]
    columns = (candidate.sum(axis=1), candidate[:, 0], other.sum(axis=1), other[:, 0], scores.positions[judged])
    rows = np.zeros((len(prompts), len(columns)))  # sums of a prompt's sequences
    np.add.at(rows, prompt_of, np.stack(columns, axis=1))

    def relative(sums: np.ndarray) -> np.ndarray:
        return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]) - 1.0

    positions = rows[:, 4]  # a few prompts can hold most positions
    return interval(rows, relative, error, seed, count=float(positions.sum() ** 2 / np.square(positions).sum()))
