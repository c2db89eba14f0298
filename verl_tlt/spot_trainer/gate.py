"""The publish gate: is the candidate to be served? A pure function of held-out scores.

Candidate, served and initial drafter are scored at the same held-out positions, because accept length differs far more
between sequences than between drafters. The responses to one prompt resemble each other, so prompts are resampled, each
with all of its sequences. Even so a difference of 1 % takes some 10,000 positions.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from verl_tlt.bootstrap import interval
from verl_tlt.messages.training import Decision, Verdict

Which = Literal["candidate", "served", "initial"]
WHICH: tuple[Which, ...] = get_args(Which)

ERROR = 0.01
"""Chance of publishing a candidate that is worse by exactly `MARGIN`, and of giving up one that is worse by exactly
`WORSE`. Every session tests anew, so the usual 5 % would let several through in fifty sessions."""
MARGIN = 0.0025
"""Share of the accept length by which a published candidate may be worse: below what a rollout could show."""
WORSE = 0.01
"""Share by which a candidate must surely be worse to be given up; otherwise it trains on and may become better."""
NOTHING_TO_LOSE = 1.1
"""Accept length below which drafting costs more than it gains nearly anywhere. A candidate replaces such a drafter
without a test if there is too little held-out text."""
MOST_POSITIONS = 32_768
"""Most held-out positions to score for a verdict. Telling a difference of 1 % takes about a third as many."""
TRAINED_PER_SCORED = 4
"""Positions that a candidate was trained on for each held-out position that judges it. Scoring a position for three
drafters with drafts of `USUAL_DRAFT` tokens takes about as long as training on it, so a fifth of the idle time goes
into scores."""
USUAL_DRAFT = 3
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


def positions_to_score(trained: int, max_draft: int) -> int:
    """Held-out positions that judge a candidate which was trained on `trained` ones, with drafts of `max_draft`."""
    share = USUAL_DRAFT / max(USUAL_DRAFT, max_draft) / TRAINED_PER_SCORED
    return min(MOST_POSITIONS, int(trained * share))


def undecidable(positions: int, prompts: int, served: float) -> Verdict | None:
    """The verdict where scores of so many held-out positions could not decide; None: score them.

    `served` is the served drafter's accept length, as far as it is known: one below `NOTHING_TO_LOSE` may be replaced.
    """
    if served < NOTHING_TO_LOSE or not _too_little(positions, prompts):
        return None
    return Verdict(reason=f"too little to judge by ({_evidence(positions, prompts)})")


def _too_little(positions: int, prompts: int) -> bool:
    return positions < MIN_POSITIONS or prompts < MIN_PROMPTS


def _evidence(positions: int, prompts: int) -> str:
    return f"{positions} positions of {prompts} held-out prompts"


def decide(scores: HeldOutScores, *, seed: int) -> Verdict:
    """Judge the candidate; the same scores and `seed` of the resampling give the same verdict.

    * revert to the better of served and initial drafter if the candidate is surely worse than that one by more than
      `WORSE`;
    * publish if it is surely less than `MARGIN` worse than the served drafter, and its measured accept length is less
      than `MARGIN` below the initial drafter's;
    * otherwise keep what is served, and train the candidate on.
    """
    tau: dict[str, float] = {which: scores.accept_length(which) for which in WHICH}
    best: Which = "initial" if tau["initial"] > tau["served"] else "served"
    positions = int(scores.positions.sum())
    prompts = len(np.unique(scores.prompts[scores.positions > 0]))
    evidence = _evidence(positions, prompts)

    def verdict(decision: Decision, serves: Which, reason: str, gain: float | None = None) -> Verdict:
        return Verdict(
            decision=decision,
            reason=f"{reason} ({evidence})",
            gain=gain,
            tau=tau,
            acceptance=scores.acceptance(serves) if positions else (),
            publishes=serves != "served",
        )

    if not np.isfinite(scores.candidate).all():
        return verdict("reverted", best, "the candidate's scores are not finite")
    if _too_little(positions, prompts):
        if positions and max(tau["served"], tau["initial"]) < NOTHING_TO_LOSE:
            return verdict("published", "candidate", f"not judged: the {best} drafter is hardly ever accepted")
        return verdict("kept", "served", "too little to judge by")

    low = relative_interval(scores, "served", error=ERROR, seed=seed)[0]
    # The better of two references is partly the luckier one: where they differ, each gets half of the error.
    references = 1 if np.array_equal(scores.served, scores.initial) else 2
    high = relative_interval(scores, best, error=ERROR / references, seed=seed)[1]
    gain = tau["candidate"] / tau["served"] - 1.0
    if high < -WORSE:
        return verdict("reverted", best, f"at least {-high:.2%} worse than the {best} drafter", gain)
    if tau["candidate"] < tau["initial"] * (1.0 - MARGIN):
        behind = 1.0 - tau["candidate"] / tau["initial"]
        return verdict("kept", "served", f"{behind:.2%} worse than the initial drafter so far", gain)
    if low > -MARGIN:
        return verdict("published", "candidate", f"{gain:+.2%} against the served drafter", gain)
    return verdict("kept", "served", f"up to {-low:.2%} worse than the served drafter", gain)


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
        tokens, drafts, other_tokens, other_drafts, _positions = sums.T
        return (tokens / drafts) / (other_tokens / other_drafts) - 1.0

    # A few prompts can hold most positions: as many prompts of equal size would say as much as all of these.
    positions = sums[:, 4]
    effective_prompts = float(positions.sum() ** 2 / np.square(positions).sum())
    return interval(sums, relative, error, seed, count=effective_prompts)


def combined(parts: Sequence[HeldOutScores]) -> HeldOutScores:
    """Scores of several groups of sequences, at least one, as one."""
    names = ("prompts", "positions", *WHICH)
    return HeldOutScores(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
