"""The merge between machines: each worker averages a few slices of the parameters, in 16 bits, in a tree.

Whole deltas to one worker would be 64 x 1.2 GB for 64 replicas of a drafter of 300M parameters. So a delta is cut into
slices of equal length, and of each group of workers everyone averages some of the slices over that group; the groups'
averages meet again in the same way (`trainer.merge_tree` deals them out). On each level a worker reads no more numbers
than one delta has, whatever the number of workers.

A number travels as a 16-bit integer times the scale of its block. Averaged changes of weights are added to weights, so
their absolute error counts, and in blocks of like sizes (AdamW's steps are) this one is 64 times smaller than
bfloat16's. Every worker adopts the same 16 bits, so that all agree to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from verl_tlt.messages.training import Merged, MergedSlice, Parameters
from verl_tlt.spot_worker.merge import exclusion, stretch, together

BLOCK = 1 << 16
"""Numbers with one scale: small enough to stay in a core's cache through all that is done to them."""
LARGEST = 32767
THREADS = min(4, os.cpu_count() or 1)
"""Of one worker: what is done to all numbers of a drafter waits for memory, of which one core cannot ask for enough."""
TINY = 1e-30
"""A block of nothing larger is zero: its scale would have no inverse."""


def hand_in(facts: Merged, now: Parameters, base: Parameters, slices: int) -> list[MergedSlice]:
    """What a worker learned, in slices.

    Args:
        facts: of its session (`merge.facts_of`).
        now: its parameters, float32, in the order in which all workers have them.
        base: those of the version all agree on.
        slices: how many; where there are fewer blocks, some are empty.
    """
    if not facts.included:
        return [_empty(facts) for _ in range(slices)]

    def pack(blocks: list[Block]) -> MergedSlice | str:
        packed = _Packer(blocks)
        for name, begin, end in blocks:
            np.subtract(_flat(now[name])[begin:end], _flat(base[name])[begin:end], out=packed.room(end - begin))
            if not packed.add():
                return name
        return packed.slice(facts)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(pack, _dealt_out(base, slices)))
    if broken := next((name for name in found if isinstance(name, str)), None):
        left_out = exclusion(facts.included[0], f"{broken} is not finite")
        return [_empty(left_out) for _ in range(slices)]
    return [part for part in found if isinstance(part, MergedSlice)]


def join(parts: Sequence[MergedSlice], *, last: bool) -> MergedSlice:
    """The same slice of several workers or groups as their average, weighted by tokens; its bits depend on no order.

    Args:
        parts: one of each.
        last: all workers are in it: the average goes as far as the longest session did (`merge.stretch`).

    Raises:
        ValueError: a worker is in two of them, or they differ in length.
    """
    ordered = sorted(parts, key=lambda part: min((*part.facts.included, *part.facts.excluded)))
    facts = together([part.facts for part in ordered])
    usable = [part for part in ordered if part.facts.included]
    if not usable:
        return _empty(facts)
    if len({(part.values.size, part.lengths) for part in usable}) > 1:
        raise ValueError(f"Deltas of {', '.join(facts.included)} differ in length.")
    weights = [part.facts.tokens / facts.tokens for part in usable]
    lengths = usable[0].lengths
    packed, one = _Packer([("", 0, length) for length in lengths]), np.empty(max(lengths, default=0), np.float32)
    begin = 0
    for block, length in enumerate(lengths):
        end = begin + length
        total = packed.room(length)
        total.fill(0.0)
        for weight, part in zip(weights, usable, strict=True):
            total += np.multiply(part.values[begin:end], np.float32(weight * part.scales[block]), out=one[:length])
        packed.add()
        begin = end
    joined = packed.slice(facts)
    return replace(joined, scales=joined.scales * np.float32(stretch(facts))) if last else joined


def added(base: Parameters, slices: Sequence[MergedSlice], live: Parameters | None = None) -> Parameters:
    """The new version all agree on, float32 on memory of its own; `base` itself where everybody was left out.

    Args:
        base: the present one.
        slices: those of the last `join`, in order.
        live: parameters that are to become the new version, too: a write while it is in the cache, not a second pass.
    """
    if not slices[0].facts.included:
        return base
    new = {name: np.empty(value.shape, np.float32) for name, value in base.items()}

    def fill(blocks: list[Block], part: MergedSlice) -> None:
        at = 0
        for (name, begin, end), scale in zip(blocks, part.scales, strict=True):
            after, out = at + end - begin, _flat(new[name])[begin:end]
            np.multiply(part.values[at:after], scale, out=out)
            out += _flat(base[name])[begin:end]
            if live is not None:
                _flat(live[name])[begin:end] = out
            at = after

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fill, _dealt_out(base, len(slices)), slices))
    return new


Block = tuple[str, int, int]
"""(parameter, first number, number after the last) of a block."""


def _dealt_out(like: Mapping[str, np.ndarray], slices: int) -> Iterator[list[Block]]:
    """The blocks of each slice: as many in each, as far as that goes."""
    blocks = [(n, a, min(a + BLOCK, value.size)) for n, value in like.items() for a in range(0, value.size, BLOCK)]
    for i in range(slices):
        yield blocks[i * len(blocks) // slices : (i + 1) * len(blocks) // slices]


class _Packer:
    """Blocks of numbers, one after the other, into 16 bits each."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._lengths = tuple(end - begin for _, begin, end in blocks)
        self._values = np.empty(sum(self._lengths), np.int16)
        self._scales = np.empty(len(blocks), np.float32)
        self._block = self._at = 0
        self._room = np.empty(max(self._lengths, default=0), np.float32)

    def room(self, length: int) -> np.ndarray:
        """Where the next block is to be written: the same memory each time, which stays in the cache."""
        self._numbers = self._room[:length]
        return self._numbers

    def add(self) -> bool:
        """Pack what was written there; False: a number in it is not finite."""
        numbers = self._numbers
        top = float(max(numbers.max(), -numbers.min()))
        if not np.isfinite(top):
            return False
        scale = top / LARGEST if top > TINY else 1.0
        numbers *= np.float32(1 / scale)
        after = self._at + len(numbers)
        np.rint(numbers, out=self._values[self._at : after], casting="unsafe")
        self._scales[self._block] = scale
        self._block, self._at = self._block + 1, after
        return True

    def slice(self, facts: Merged) -> MergedSlice:
        """All that was added."""
        return MergedSlice(facts, self._values, self._scales, self._lengths)


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1)


def _empty(facts: Merged) -> MergedSlice:
    return MergedSlice(facts, np.empty(0, np.int16), np.empty(0, np.float32), ())
