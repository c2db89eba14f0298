"""Which tokens of a sequence lie where on a rank: plain arithmetic about how training engines split a batch.

An engine puts the sequences of a micro-batch on one *token axis* (packed) or on one axis each (padded), and may split
that axis over ranks: evenly (Ulysses, Megatron's sequence parallel) or in two chunks of every sequence (Megatron's
context parallel). The functions here compose: each takes the stretches there are and returns those that are left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of one sequence that lie side by side on a rank's token axis."""

    start: int
    """First token, counted in the sequence."""
    stop: int
    """Token after the last."""
    at: int
    """Where the first one lies on the axis."""


def zigzag(length: int, padded: int, at: int, rank: int, ranks: int) -> list[Stretch]:
    """What context parallelism leaves of one sequence: chunk `rank` and chunk `-1 - rank` of `2 * ranks` equal ones.

    Args:
        length: tokens of the sequence.
        padded: the same with the padding that makes chunks equal; a multiple of `2 * ranks`, or anything with one rank.
        at: where its share begins on the axis.
        rank: of this rank in the context-parallel group.
        ranks: size of that group.
    """
    if ranks == 1:
        return [Stretch(0, length, at)]
    chunk = padded // (2 * ranks)
    first, second = rank * chunk, (2 * ranks - 1 - rank) * chunk
    pieces = [Stretch(first, first + chunk, at), Stretch(second, second + chunk, at + chunk)]
    return window(pieces, 0, length)  # without the padding


def even_split(stretches: Iterable[Stretch], size: int, rank: int) -> list[Stretch]:
    """What is left where ranks share the axis evenly: rank r holds its indices [r * size, (r + 1) * size)."""
    low, left = rank * size, []
    for s in stretches:
        first, after = max(s.at, low), min(s.at + s.stop - s.start, low + size)
        if first < after:
            left.append(Stretch(s.start + first - s.at, s.start + after - s.at, first - low))
    return left


def window(stretches: Iterable[Stretch], start: int, stop: int) -> list[Stretch]:
    """What of them lies in tokens [start, stop) of the sequence."""
    cut = ((max(s.start, start), min(s.stop, stop), s) for s in stretches)
    return [Stretch(a, b, s.at + a - s.start) for a, b, s in cut if a < b]
