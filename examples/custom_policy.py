"""A policy of your own that chooses the draft length K of every engine step.

    tlt.speculation.policy=examples.custom_policy:LongTail

It drafts the longest draft for small batches, as long as half of its first tokens are accepted, else nothing until
another drafter is loaded.
"""

from collections.abc import Sequence

from verl_tlt.speculation.types import Policy, Step

SMALL = 16


class LongTail(Policy):
    """An engine calls `choose` before each step and `observe` after it, on one thread."""

    def __init__(self, lengths: Sequence[int], largest_batch: int) -> None:
        """`lengths`: draft lengths that the engine may use, ascending from 0; `largest_batch`: its `max_num_seqs`."""
        self._longest = lengths[-1]
        self._accepted = 0.5  # share of first draft tokens that were accepted lately

    def choose(self, batch: int) -> int:
        return self._longest if batch <= SMALL and self._accepted >= 0.5 else 0

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        """A drafter was loaded whose first tokens are accepted with probability `conditional[0]`; empty: unknown."""
        self._accepted = conditional[0] if conditional else 0.5

    def observe(self, step: Step) -> None:
        if step.num_drafts:
            accepted = step.num_accepted_tokens_per_pos[0] / step.num_drafts
            self._accepted += 0.05 * (accepted - self._accepted)
