"""The share of draft tokens that is accepted at each draft position, in one exponential window."""

from collections.abc import Sequence

from verl_tlt.speculation.types import ControlError

FIRST_GUESS = 0.5
"""Conditional acceptance of the first position while nothing is known."""
DECAY = 0.95
"""Conditional acceptance of a position relative to the one before it while nothing is known (EAGLE heads: 0.8 to 1)."""
PRIOR_DRAFTS = 24.0
"""Weight of a new drafter's held-out acceptance, in drafts."""
WINDOW_DRAFTS = 400.0
"""Drafts after which evidence counts 1/e: their mean is known to 0.02, and a tail of 4 responses takes 100 steps."""
WINDOW_STEPS = 8.0
"""Fewest steps that the window spans: one step of a large batch may have more than `WINDOW_DRAFTS` drafts."""


class AcceptanceEstimate:
    """Conditional acceptance P(position i accepted | all before it accepted) at `longest` positions, and τ from it.

    `conditional` is the acceptance to begin with, measured on held-out text (in 0..1, else ControlError); empty:
    unknown. A draft of K tokens gives evidence for the first K positions. Each later position keeps its ratio to the
    one before it.
    """

    def __init__(self, longest: int, conditional: Sequence[float] = ()) -> None:
        if wrong := [p for p in conditional if not 0.0 <= p <= 1.0]:
            raise ControlError(f"Acceptance probabilities must lie in 0..1, not {wrong[0]}.")
        self.longest = longest
        self.conditional = list(conditional[:longest])
        while len(self.conditional) < longest:
            self.conditional.append(self.conditional[-1] * DECAY if self.conditional else FIRST_GUESS)
        prior_drafts = PRIOR_DRAFTS if conditional else 2.0
        self._drafts = [prior_drafts] * longest  # how many drafts each position's estimate is based on
        before = [1.0, *self.conditional]
        # Positions after one that is never accepted were not observed, so their zeros say nothing about the ratio.
        self._ratio = [p / b if b else DECAY for p, b in zip(self.conditional, before, strict=False)]

    def observe(self, drafts: int, accepted: Sequence[int]) -> None:
        """Learn from the drafts of one step, of K = len(accepted) tokens each.

        accepted[i] is the number of drafts whose first i+1 tokens were accepted.
        """
        if drafts <= 0 or not accepted:
            return
        window = max(WINDOW_DRAFTS, WINDOW_STEPS * drafts)
        reached = drafts  # how many of them had all tokens before position i accepted
        for i, hits in enumerate(accepted):
            if reached <= 0:
                break
            self._drafts[i] = min(self._drafts[i] + reached, window)
            weight = min(1.0, reached / self._drafts[i])
            self.conditional[i] += weight * (hits / reached - self.conditional[i])
            before = self.conditional[i - 1] if i > 0 else 1.0
            self._ratio[i] = self.conditional[i] / max(before, 1e-6)
            reached = hits
        for i in range(len(accepted), self.longest):
            self.conditional[i] = min(1.0, self.conditional[i - 1] * self._ratio[i])

    def accept_lengths(self) -> list[float]:
        """τ(0), τ(1), ... τ(longest): tokens per request and step, the target's own included."""
        tau = [1.0]
        all_accepted = 1.0  # probability that every draft token up to this position is accepted
        for p in self.conditional:
            all_accepted *= p
            tau.append(tau[-1] + all_accepted)
        return tau


def expected_accept_lengths(conditional: Sequence[float], longest: int) -> list[float]:
    """τ(0), τ(1), ... τ(`longest`) of a drafter with this conditional acceptance."""
    return AcceptanceEstimate(longest, conditional).accept_lengths()
