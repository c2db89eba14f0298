"""Average what several workers learned, weighted by the tokens they learned it from.

Workers train alone on their own data (local SGD; no process group exists), each hands in the change of its parameters
since the version all agree on. A hand-in that would spoil the average is left out and named: too few optimizer steps
(AdamW's first steps go by sign alone), nothing in it, or a number that is not finite.

Bubbles differ in length, and a plain average would let a short session hold a long one back. Take a session of t tokens
to move the parameters by t * g and noise. Least squares then gives g = sum(t_i d_i) / sum(t_i^2), and the merged change
is g times the longest session: the average of equal sessions, and a longer step in its direction for unequal ones.
During the warm-up tokens move less, so each counts by its learning rate.

Between machines the same average is made slice by slice (`spot_worker.merge_slices`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from verl_tlt.messages.training import Contribution, Merged


def merge(contributions: Sequence[Contribution], *, min_steps: int) -> Merged:
    """What the usable contributions learned together; the same bits in whatever order they come.

    Raises:
        ValueError: a worker appears twice, or two workers' deltas differ in names or shapes.
    """
    parts = [_prepare(c, min_steps) for c in sorted(contributions, key=lambda c: c.worker)]
    facts = together(parts)
    level = [part for part in parts if part.included]
    if not level:
        return facts
    # By two, so that rounding grows with log2(n); a fixed order, so that it is the same for all.
    while len(level) > 1:
        odd = [level[-1]] if len(level) % 2 else []
        level = [_combine(a, b) for a, b in zip(level[::2], level[1::2], strict=False)] + odd
    assert level[0].delta is not None
    longer = np.float32(stretch(facts))
    return replace(facts, delta={name: longer * value for name, value in level[0].delta.items()})


def facts_of(worker: str, tokens: int, steps: int, min_steps: int) -> Merged:
    """One worker's hand-in as an average of itself, or as an exclusion, without its delta."""
    reason = None
    if steps < min_steps:
        reason = f"{steps} optimizer steps, fewer than {min_steps}"
    elif tokens <= 0:
        reason = "it trained on no tokens"
    return exclusion(worker, reason) if reason else Merged(None, tokens, (worker,), longest=tokens, squares=tokens**2)


def exclusion(worker: str, reason: str) -> Merged:
    """A hand-in that is left out."""
    return Merged(None, 0, (), {worker: reason})


def together(parts: Sequence[Merged]) -> Merged:
    """The facts of several averages as those of one; no delta.

    Raises:
        ValueError: a worker appears twice.
    """
    names = [name for part in parts for name in (*part.included, *part.excluded)]
    if len(set(names)) != len(names):
        raise ValueError(f"A worker hands in once per merge, but these did: {', '.join(names)}.")
    return Merged(
        None,
        tokens=sum(part.tokens for part in parts),
        included=tuple(name for part in parts for name in part.included),
        excluded={name: reason for part in parts for name, reason in part.excluded.items()},
        longest=max((part.longest for part in parts), default=0),
        squares=sum(part.squares for part in parts),
    )


def stretch(average: Merged) -> float:
    """How much further than the plain average the merged change goes (see above): 1 for equal sessions."""
    return average.longest * average.tokens / average.squares if average.squares else 1.0


def _prepare(contribution: Contribution, min_steps: int) -> Merged:
    c = contribution
    facts = facts_of(c.worker, c.tokens, c.steps, min_steps)
    if facts.included and (reason := _unusable(c.delta)):
        return exclusion(c.worker, reason)
    return replace(facts, delta={name: np.asarray(value, dtype=np.float32) for name, value in c.delta.items()})


def _combine(left: Merged, right: Merged) -> Merged:
    """Two averages as one, weighted by their tokens."""
    assert left.delta is not None and right.delta is not None
    _check_alike(left, right)
    facts = together([left, right])
    share = np.float32(right.tokens / facts.tokens)
    # A running average stays within the range of its inputs, whatever the number of workers.
    return replace(facts, delta={name: a + share * (right.delta[name] - a) for name, a in left.delta.items()})


def _unusable(delta: Mapping[str, np.ndarray]) -> str | None:
    if not delta:
        return "its delta is empty"
    return next((f"{name} is not finite" for name, value in delta.items() if not np.isfinite(value).all()), None)


def _check_alike(left: Merged, right: Merged) -> None:
    shapes = [{name: value.shape for name, value in (side.delta or {}).items()} for side in (left, right)]
    if shapes[0] != shapes[1]:
        different = sorted(n for n in shapes[0].keys() | shapes[1].keys() if shapes[0].get(n) != shapes[1].get(n))
        raise ValueError(
            f"Deltas of {', '.join(left.included)} and {', '.join(right.included)} differ in {', '.join(different)}."
        )
