"""The publish gate: compares a merged drafter with the served and the initial one, and decides whether it is served.

They are compared by accept length at the same held-out positions, because it differs far more between sequences than
between drafters. Positions of one sequence resemble each other, so whole sequences are resampled. Even so a difference
of 1 % takes some 10k positions.

* revert where the candidate is surely worse by more than `WORSE` than the better of served and initial;
* publish where it is surely not worse than the served drafter by `margin` or more, and not seen to be worse than the
  initial one;
* hold otherwise: what is served stays, and the candidate trains on.

"Surely" means that a candidate on the wrong side of the border is published (reverted) with a chance of `ERROR` at
most. So does too little to judge hold, unless the served drafter is hardly ever accepted or the candidate is far
better, as at the start of a run, when the drafter learns fastest and little is held out yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from verl_tlt.config import GateConfig
from verl_tlt.messages.training import HeldOutScores

Action = Literal["publish", "hold", "revert_served", "revert_initial"]

ERROR = 0.01
"""Chance of a wrong publication or reversion at the border. A candidate is judged anew after every session, and one
lucky verdict publishes: at the usual level of 5 % a run of fifty sessions would have several."""
RESAMPLES = 2000
"""Bootstrap draws: the level is then off by half a percentage point at most, less than few sequences cost."""
WORSE = 0.01
"""Share of the accept length by which a candidate must surely be worse to be given up; else it is trained on, and may
become better."""
NOTHING_TO_LOSE = 1.1
"""Below this accept length drafting costs more than it gains nearly anywhere: an unjudged candidate may replace it."""
FAR_BETTER = 0.2
"""Share by which an unjudged candidate must lead: ten standard errors of paired scores at `FEWEST` positions, so that
not even sequences that happen to suit one drafter explain it."""
FEWEST = 128
"""Positions below which nothing is far better."""
MIN_SEQUENCES = 7
"""With fewer, all of them favour a drafter that is no better with a chance above `ERROR` (2^-6 = 1.6 %)."""


@dataclass(frozen=True)
class Decision:
    """What to do with the candidate, and why."""

    action: Action
    reason: str
    versus_served: float
    """The candidate's accept length relative to the served drafter's, minus one."""
    interval: tuple[float, float] | None
    """Around `versus_served`; the truth lies beyond either end with a chance of `ERROR`. None: not judged."""


def decide(scores: HeldOutScores, config: GateConfig, *, seed: int) -> Decision:
    """Judge the candidate; the same scores and bootstrap `seed` give the same decision."""
    tau = scores.taus()
    best = "initial" if tau["initial"] > tau["served"] else "served"
    back: Action = "revert_initial" if best == "initial" else "revert_served"
    positions, sequences = int(scores.positions.sum()), int((scores.positions > 0).sum())
    interval: tuple[float, float] | None = None

    def decision(action: Action, reason: str) -> Decision:
        return Decision(action, reason, tau["candidate"] / tau["served"] - 1.0, interval)

    if not np.isfinite(scores.candidate).all():
        return decision(back, "the candidate's scores are not finite")
    if positions < config.min_tokens or sequences < MIN_SEQUENCES:
        few = f"{positions} positions in {sequences} held-out sequences are too few to judge"
        far_better = positions >= FEWEST and tau["candidate"] >= tau[best] * (1.0 + FAR_BETTER)
        return decision("publish" if far_better or tau[best] < NOTHING_TO_LOSE else "hold", few)

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
    sequences = int(judged.sum())
    drawn = np.random.default_rng(seed).integers(sequences, size=(RESAMPLES, sequences))  # sequence numbers
    cells = drawn + sequences * np.arange(RESAMPLES)[:, None]  # one histogram for all rows: far faster than multinomial
    times = np.bincount(cells.ravel(), minlength=RESAMPLES * sequences)  # how often a sequence is in a resample
    weights = times.reshape(RESAMPLES, sequences).astype(np.float64)

    def accept_lengths(which: str) -> np.ndarray:  # [RESAMPLES]
        counts = scores.of(which)[judged]  # [S, 1+K]
        return (weights @ counts.sum(axis=1)) / (weights @ counts[:, 0])

    relative = accept_lengths("candidate") / accept_lengths(against) - 1.0
    level = _level(scores.positions[judged].astype(np.float64), error)
    low, high = np.quantile(relative, [level, 1.0 - level])
    return float(low), float(high)


def _level(n: np.ndarray, error: float) -> float:
    """The percentile at which a bootstrap over sequences of `n` [S] positions errs with a chance of `error`.

    A plain percentile is too narrow for few sequences; this is the expanded percentile interval (Hesterberg, "What
    Teachers Should Know About the Bootstrap", 2015), with the number of sequences replaced by the effective number of
    equally long ones, since a few long ones can hold most positions.
    """
    effective = float(n.sum() ** 2 / np.square(n).sum())
    freedom = max(1.0, effective - 1.0)
    return NormalDist().cdf(-math.sqrt((freedom + 1.0) / freedom) * _student(1.0 - error, freedom))


def _student(p: float, freedom: float) -> float:
    """Quantile of Student's t by its expansion in 1/freedom (Abramowitz and Stegun 26.7.5); within 2 % from 3 on."""
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**k for k, term in enumerate(terms, start=1))
