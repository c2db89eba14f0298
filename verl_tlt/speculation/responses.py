"""What was accepted of the drafts of long responses, and of short ones.

A rollout ends with its longest responses, and the accept length of the whole batch is not theirs: late in a response
the context is longer than most of what a drafter was trained on. So drafts are counted by the length that their
response reached in the end. Numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from verl_tlt.messages.rollout import ResponseDrafts

PER_OCTAVE = 8
"""Classes between a length and its double: they bound what an engine reports, however many responses end."""


class DraftsByLength:
    """Drafts of the responses in flight, and sums over those that ended since the last reset."""

    def __init__(self) -> None:
        self._flying: dict[str, list[int]] = {}  # request → [drafts, accepted tokens]
        self._ended: dict[int, list[int]] = {}  # class → [responses, tokens, drafts, accepted tokens]

    def verified(self, accepted: Iterable[tuple[str, int]]) -> None:
        """Count a step's drafts.

        Args:
            accepted: (request, draft tokens accepted) for each.
        """
        flying = self._flying
        for request, tokens in accepted:
            row = flying.get(request)
            if row is None:
                flying[request] = [1, tokens]
            else:
                row[0] += 1
                row[1] += tokens

    def ended(self, request: str, tokens: int) -> None:
        """A request has ended with so many tokens; one without any says nothing of responses."""
        drafts, accepted = self._flying.pop(request, (0, 0))
        if tokens > 0:
            row = self._ended.setdefault(round(PER_OCTAVE * math.log2(tokens)), [0, 0, 0, 0])
            for i, count in enumerate((1, tokens, drafts, accepted)):
                row[i] += count

    def rows(self, reset: bool = False) -> tuple[ResponseDrafts, ...]:
        """The sums by class of length, ascending; those of responses in flight stay with them."""
        rows = tuple(ResponseDrafts(*row) for _, row in sorted(self._ended.items()))
        if reset:
            self._ended = {}
        return rows
