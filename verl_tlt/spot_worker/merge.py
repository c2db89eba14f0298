"""Average what several workers learned, weighted by the tokens they learned it from.

Workers train alone on their own data (local SGD; no process group exists), each hands in the change of its parameters
since the version all agree on. A hand-in that would spoil the average is left out and named: too few optimizer steps
(AdamW's first steps go by sign alone), nothing in it, or a number that is not finite.

Bubbles differ in length, and a plain average would let a short session hold a long one back. Take a session of t tokens
to move the parameters by t * g and noise. Least squares then gives g = sum(t_i d_i) / sum(t_i^2), and the merged change
is g times the longest session: the average of equal sessions, and a longer step in its direction for unequal ones.
During the warm-up tokens move less, so each counts by its learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verl_tlt.messages.training import Contribution, Merged


def merge(contributions: Sequence[Contribution], *, min_steps: int) -> Merged:
    """What the usable contributions learned together; the same bits in whatever order they come.

    Raises:
        ValueError: a worker appears twice, or two workers' deltas differ in names or shapes.
    """
    ordered = sorted(contributions, key=lambda c: c.worker)
    names = [c.worker for c in ordered]
    if len(set(names)) != len(names):
        raise ValueError(f"A worker hands in once per merge, but these did: {', '.join(names)}.")
    if not ordered:
        return Merged(None, 0, ())
    # By two, so that rounding grows with log2(n); a fixed order, so that it is the same for all.
    level = [_prepare(c, min_steps) for c in ordered]
    while len(level) > 1:
        odd = [level[-1]] if len(level) % 2 else []
        level = [_combine(a, b) for a, b in zip(level[::2], level[1::2], strict=False)] + odd
    return _finish(level[0])


def _prepare(contribution: Contribution, min_steps: int) -> Merged:
    """One contribution as an average of itself, or as an exclusion."""
    reason = _unusable(contribution, min_steps)
    if reason is not None:
        return Merged(None, 0, (), {contribution.worker: reason})
    delta = {name: np.asarray(value, dtype=np.float32) for name, value in contribution.delta.items()}
    n = contribution.tokens
    return Merged(delta, n, (contribution.worker,), longest=n, squares=n * n)


def _combine(left: Merged, right: Merged) -> Merged:
    """Two averages as one, weighted by their tokens; an empty one only adds its exclusions."""
    excluded = {**left.excluded, **right.excluded}
    if left.delta is None or right.delta is None:
        return replace(left if right.delta is None else right, excluded=excluded)
    _check_alike(left, right)
    tokens = left.tokens + right.tokens
    share = np.float32(right.tokens / tokens)
    # A running average stays within the range of its inputs, whatever the number of workers.
    delta = {name: a + share * (right.delta[name] - a) for name, a in left.delta.items()}
    longest, squares = max(left.longest, right.longest), left.squares + right.squares
    return Merged(delta, tokens, left.included + right.included, excluded, longest, squares)


def _finish(average: Merged) -> Merged:
    """The average over all workers, as far as the longest session goes (see above)."""
    if average.delta is None:
        return average
    stretch = np.float32(average.longest * average.tokens / average.squares)  # 1 for equal sessions
    return replace(average, delta={name: stretch * value for name, value in average.delta.items()})


def _unusable(c: Contribution, min_steps: int) -> str | None:
    if c.steps < min_steps:
        return f"{c.steps} optimizer steps, fewer than {min_steps}"
    if c.tokens <= 0:
        return "it trained on no tokens"
    if not c.delta:
        return "its delta is empty"
    for name, value in c.delta.items():
        if not np.isfinite(value).all():
            return f"{name} is not finite"
    return None


def _check_alike(left: Merged, right: Merged) -> None:
    shapes = [{name: value.shape for name, value in (side.delta or {}).items()} for side in (left, right)]
    if shapes[0] != shapes[1]:
        different = sorted(n for n in shapes[0].keys() | shapes[1].keys() if shapes[0].get(n) != shapes[1].get(n))
        raise ValueError(
            f"Deltas of {', '.join(left.included)} and {', '.join(right.included)} differ in {', '.join(different)}."
        )
