"""Counts the drafts that one engine step verified, and how far each was accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(eq=False)
class Verified:
    """Drafts verified in one step, counted as vLLM counts them (not frozen, which is slow to make)."""

    lengths: Sequence[int] = ()
    """Tokens that the step sampled, by row, the target's own included; nothing where it verified no draft."""
    drafts_of: Mapping[str, Sequence[int]] | None = None
    """Request → its draft (`SchedulerOutput.scheduled_spec_decode_tokens`)."""
    row_of: Mapping[str, int] | None = None
    """Request → row."""
    scheduled: int = 0
    """Tokens scheduled over all requests of the step."""
    requests: int = 0
    """Requests of the step."""
    gone: Collection[str] = ()
    """Those of them that ended while the step ran, and do not count."""

    @cached_property
    def _whole(self) -> bool:
        """Every request had a draft, is alive and got a token."""
        everyone = len(self.drafts_of or ()) == self.requests
        return everyone and bool(self.lengths) and not self.gone and 0 not in self.lengths

    @cached_property
    def _rows(self) -> list[tuple[int, int]]:
        """(draft tokens, tokens sampled) of each draft that counts."""
        drafts, rows = self.drafts_of or {}, self.row_of or {}
        found = ((len(d), self.lengths[rows[r]]) for r, d in drafts.items() if r not in self.gone)
        return [row for row in found if row[1]] if self.lengths else []

    @cached_property
    def _counts(self) -> Counter[int]:
        """How many of the drafts gave n tokens."""
        return Counter(self.lengths if self._whole else (n for _, n in self._rows))

    @property
    def num_drafts(self) -> int:
        """Requests that had a draft verified in this step."""
        return self.requests if self._whole else len(self._rows)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens in those drafts."""
        # Each request with a draft also computes the one token that it was sampled last.
        return self.scheduled - self.requests if self._whole else sum(width for width, _ in self._rows)

    @property
    def accepted_of(self) -> Iterator[tuple[str, int]]:
        """(request, draft tokens accepted) of each draft that counts."""
        lengths, rows, gone = self.lengths, self.row_of or {}, self.gone
        for request in self.drafts_of or () if lengths else ():
            if request not in gone and (tokens := lengths[rows[request]]):
                yield request, tokens - 1

    @property
    def tokens(self) -> int | None:
        """Tokens the step sampled, where every request of the step had a draft; None: not counted here."""
        return sum(self.lengths) if self._whole else None

    def num_accepted_tokens_per_pos(self, draft_length: int) -> tuple[int, ...]:
        """[i]: drafts whose first i+1 tokens were accepted, for i below `draft_length`; as `StepRecord` has it."""
        exactly = [self._counts[i + 1] for i in range(draft_length, 0, -1)]  # K, K-1, ... 1 drafted tokens accepted
        return tuple(accumulate(exactly))[::-1]


NOTHING = Verified()


def count_verified(
    scheduled: Mapping[str, int],
    drafts: Mapping[str, Sequence[int]],
    total: int,
    sampled: Sequence[Sequence[int]],
    row_of: Mapping[str, int],
    gone: Collection[str],
) -> Verified:
    """Note one step's drafts before vLLM shortens the rows of requests that end; arguments as vLLM's outputs have them.

    The next step waits for this; the rest is computed when it is asked for, while the model runs that step.
    """
    if not drafts or not sampled:
        return NOTHING
    return Verified(list(map(len, sampled)), drafts, row_of, total, len(scheduled), gone)
