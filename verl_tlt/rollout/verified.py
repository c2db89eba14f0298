"""Counts what one engine step verified, with loops in C: it runs between two steps, for hundreds of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Verified:
    """Drafts verified in one step, counted as vLLM counts them."""

    drafts: int = 0
    """Requests that had a draft verified."""
    draft_tokens: int = 0
    """Tokens in those drafts."""
    tokens: int | None = None
    """Tokens the step sampled, where every request of the step had a draft; None: not counted here."""
    lengths: Mapping[int, int] | None = None
    """How many of the drafts gave n tokens, the target's own included."""

    def accepted(self, draft_length: int) -> tuple[int, ...]:
        """`StepRecord.accepted`: drafts whose first i+1 tokens were accepted, for i below `draft_length`."""
        lengths = self.lengths or {}
        exactly = [lengths.get(i + 1, 0) for i in range(draft_length, 0, -1)]  # K, K-1, ... 1 drafted tokens accepted
        return tuple(accumulate(exactly))[::-1]


NOTHING = Verified()


def count_verified(
    scheduled: Mapping[str, int],
    drafts: Mapping[str, Sequence[int]],
    total: int,
    sampled: Sequence[Sequence[int]],
    row_of: Mapping[str, int],
    alive: Mapping[str, object],
) -> Verified:
    """Count one step's drafts before vLLM consumes them.

    Args:
        scheduled: request → tokens scheduled (`SchedulerOutput.num_scheduled_tokens`).
        drafts: request → its draft (`SchedulerOutput.scheduled_spec_decode_tokens`).
        total: sum of `scheduled`.
        sampled: tokens by row (`ModelRunnerOutput.sampled_token_ids`).
        row_of: request → row.
        alive: requests that vLLM still knows; the others ended while this step ran, and do not count.
    """
    if not drafts or not sampled:
        return NOTHING
    if len(drafts) == len(scheduled) and scheduled.keys() <= alive.keys():
        lengths = Counter(map(len, sampled))
        if 0 not in lengths:
            tokens = sum(n * count for n, count in lengths.items())
            # Each request with a draft also computes the one token that it was sampled last.
            return Verified(len(drafts), total - len(drafts), tokens, lengths)
    rows = [(len(draft), len(sampled[row_of[r]])) for r, draft in drafts.items() if r in alive and sampled[row_of[r]]]
    return Verified(len(rows), sum(width for width, _ in rows), None, Counter(n for _, n in rows))
