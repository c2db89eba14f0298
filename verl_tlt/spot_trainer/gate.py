"""The publish gate: is the candidate to be served? A pure function of held-out scores.

Candidate, served and initial drafter are scored at the same held-out positions, because accept length differs far more
between sequences than between drafters. The responses to one prompt resemble each other, so prompts are resampled, each
with all of its sequences. Even so a difference of 1 % takes some 10,000 positions.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_tlt.bootstrap import interval
from verl_tlt.messages.training import Verdict

Which = Literal["candidate", "served", "initial"]

ERROR = 0.01
"""Chance of a wrong decision at the border. A candidate is judged anew after every session, and one lucky verdict
publishes: at the usual level of 5 % a run of fifty sessions would have several."""
MARGIN = 0.0025
"""Share of the accept length by which a published candidate may be worse: below what a rollout could show."""
WORSE = 0.01
"""Share by which a candidate must surely be worse to be given up; otherwise it trains on and may become better."""
NOTHING_TO_LOSE = 1.1
"""Accept length below which drafting costs more than it gains nearly anywhere: a candidate that nobody could judge may
replace such a drafter."""
MIN_POSITIONS = 512
"""Fewest held-out positions to judge by."""
MIN_PROMPTS = 7
"""Fewest prompts to judge by: six all favour one of two equal drafters with a chance above `ERROR` (2^-6 = 1.6 %)."""


@dataclass(frozen=True)
class HeldOutScores:
    """Held-out acceptance of three drafters at the same positions, by sequence.

    Counts are float64 [S, 1+K], `SequenceScore.drafts` and `.accepted`: the drafts expected over the sequence (drafters
    differ in how many they need), then those of them whose first 1, 2, ..., K tokens are all accepted.
    """

    prompts: np.ndarray  # number of each sequence's prompt, uint64 [S]
    positions: np.ndarray  # positions judged in each sequence, int [S]
    candidate: np.ndarray
    served: np.ndarray
    initial: np.ndarray

    def counts(self, which: Which) -> np.ndarray:
        """The counts of one drafter, [S, 1+K]."""
        counts: np.ndarray = {"candidate": self.candidate, "served": self.served, "initial": self.initial}[which]
        return counts

    def accept_length(self, which: Which) -> float:
        """Tokens per draft over all sequences, with the one that the policy adds; 1 where nothing was judged."""
        counts = self.counts(which).sum(axis=0)
        return float(counts.sum() / counts[0]) if counts[0] else 1.0

    def acceptance(self, which: Which) -> tuple[float, ...]:
        """Chance, for each of the K draft positions, that it is accepted given that those before it were."""
        counts = self.counts(which).sum(axis=0).tolist()
        return tuple(min(1.0, after / before) if before > 0 else 0.0 for before, after in itertools.pairwise(counts))


@dataclass(frozen=True)
class Decision:
    """What the gate decides."""

    action: Literal["publish", "keep", "revert"]
    serves: Which  # the drafter that is served from then on
    reason: str
    gain_low: float | None = None
    """Lower end of the interval around (accept length of the candidate / of the served drafter) - 1; None: there was
    too little to judge by."""


def decide(scores: HeldOutScores, *, seed: int, min_positions: int = MIN_POSITIONS, margin: float = MARGIN) -> Decision:
    """Judge the candidate; the same scores and `seed` of the resampling give the same decision.

    * revert to the better of served and initial drafter where the candidate is surely worse by more than `WORSE`;
    * publish where it is surely not worse than the served drafter by `margin`, and not seen to be worse than the
      initial one by as much;
    * keep what is served otherwise, and train the candidate on.
    """
    served, initial, candidate = (scores.accept_length(which) for which in ("served", "initial", "candidate"))
    best: Which = "initial" if initial > served else "served"
    positions = int(scores.positions.sum())
    prompts = len(np.unique(scores.prompts[scores.positions > 0]))
    evidence = f"{positions} positions of {prompts} held-out prompts"

    if not np.isfinite(scores.candidate).all():
        return Decision("revert", best, "the candidate's scores are not finite")
    if positions < min_positions or prompts < MIN_PROMPTS:
        if positions and max(served, initial) < NOTHING_TO_LOSE:
            return Decision(
                "publish", "candidate", f"not judged: the {best} drafter is hardly ever accepted ({evidence})"
            )
        return Decision("keep", "served", f"too little to judge by ({evidence})")

    low = relative_interval(scores, "served", error=ERROR, seed=seed)[0]
    # The better of two references is partly the luckier one: where they differ, each gets half of the error.
    references = 1 if np.array_equal(scores.served, scores.initial) else 2
    high = relative_interval(scores, best, error=ERROR / references, seed=seed)[1]
    if high < -WORSE:
        return Decision("revert", best, f"at least {-high:.2%} worse than the {best} drafter ({evidence})", low)
    if candidate < initial * (1.0 - margin):
        behind = 1.0 - candidate / initial
        return Decision("keep", "served", f"{behind:.2%} worse than the initial drafter so far ({evidence})", low)
    if low > -margin:
        gain = candidate / served - 1.0
        return Decision("publish", "candidate", f"{gain:+.2%} against the served drafter ({evidence})", low)
    return Decision("keep", "served", f"up to {-low:.2%} worse than the served drafter ({evidence})", low)


def relative_interval(scores: HeldOutScores, against: Which, *, error: float, seed: int) -> tuple[float, float]:
    """Interval of (accept length of the candidate / of `against`) - 1, missed with a chance of `error` on each side."""
    judged = scores.positions > 0
    prompts, prompt_of = np.unique(scores.prompts[judged], return_inverse=True)  # [P]; [S]: index into the former
    candidate = scores.candidate[judged]  # [S, 1+K]
    other = scores.counts(against)[judged]
    columns = (candidate.sum(axis=1), candidate[:, 0], other.sum(axis=1), other[:, 0], scores.positions[judged])
    sums = np.zeros((len(prompts), len(columns)))  # of each prompt's sequences
    np.add.at(sums, prompt_of, np.stack(columns, axis=1))

    def relative(sums: np.ndarray) -> np.ndarray:
        return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]) - 1.0

    weights = sums[:, 4]  # a few prompts can hold most positions
    return interval(sums, relative, error, seed, count=float(weights.sum() ** 2 / np.square(weights).sum()))


def verdict(scores: HeldOutScores, decision: Decision) -> Verdict:
    """What the RL trainer is told of a decision."""
    tau = {which: scores.accept_length(which) for which in ("candidate", "served", "initial")}
    judged = decision.gain_low is not None and all(map(math.isfinite, tau.values()))
    back_to_initial = decision.serves == "initial" and not np.array_equal(scores.served, scores.initial)
    decisions: dict[str, Literal["published", "kept", "reverted"]] = {
        "publish": "published", "keep": "kept", "revert": "reverted",
    }  # fmt: skip
    return Verdict(
        decision=decisions[decision.action],
        reason=decision.reason,
        gain=tau["candidate"] / tau["served"] - 1.0 if judged else None,
        gain_low=decision.gain_low if judged else None,
        tau=tau,
        acceptance=scores.acceptance(decision.serves) if scores.positions.any() else (),
        publishes=decision.action == "publish" or back_to_initial,
    )


def combined(parts: Sequence[HeldOutScores]) -> HeldOutScores:
    """Scores of several groups of sequences, at least one, as one."""
    names = ("prompts", "positions", "candidate", "served", "initial")
    return HeldOutScores(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
