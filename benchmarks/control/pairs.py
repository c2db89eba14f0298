"""One arm's seconds over another's, as `verl-tlt compare` pools them: both sides of a pair did the same work."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tlt.commands.compare.pooled import ratio


def over(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """All their seconds over all of ours, pair by pair: [ratio, low, high] (95 %)."""
    found = ratio(list(zip(theirs, ours, strict=True)), float, lambda _: 1.0)
    return [found["pooled"], found["low"], found["high"]]
