"""The versions of the drafter that all spot workers agree on, and the merge by which they get the next one.

Workers train alone on their own data (local SGD; no process group exists), and each hands in the change of its
parameters since the candidate that all agree on. The merged change is their average, weighted by tokens. Bubbles differ
in length, and a plain average would let a short session hold a long one back. Take a session of t tokens to move the
parameters by t * g and noise. Least squares then gives g = sum(t_i d_i) / sum(t_i^2), and the merged change is g times
the longest session: the average of equal sessions, and a longer step in its direction for unequal ones. During the
warm-up tokens move less: each counts by its learning rate.

A change travels in slices, each averaged by another worker (`start_merge`). A number is a
16-bit integer times the scale of its block: averaged changes are added to weights, so their absolute error counts, and
in blocks of like sizes (AdamW's steps are) it is 64 times smaller than bfloat16's. Every worker adopts the same bits.
"""

from __future__ import annotations

import copy
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from verl_tlt.drafter.train import AVERAGE
from verl_tlt.messages.training import VERSIONS, MergedSlice, MergeFacts, Parameters, Resumed

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from verl_tlt.drafter import DrafterTrainer

INITIAL = "initial"
"""Key of the initial parameters in a checkpoint's training state, which is the candidate's; absent where they are the
served ones."""
FAN_IN = 8
"""Workers of a group that merges, and slices: on each level a worker reads no more than one drafter's change."""
BLOCK = 1 << 16
"""Numbers with one scale: small enough to stay in a core's cache through all that is done to them."""
LARGEST = 32767
THREADS = min(4, os.cpu_count() or 1)
"""Threads of one worker: one core alone cannot ask the memory for numbers fast enough."""
TINY = 1e-30
"""A block of nothing larger is zero: its scale would have no inverse."""


# ---------------------------------------------------------------------- versions


@dataclass(frozen=True)
class DrafterVersions:
    """The versions that all spot workers agree on, what one is training not among them: each event makes the next.

    Parameters of a version are replaced, never written to. A run begins with one version in all three roles.
    """

    candidate: Parameters  # the newest one: the served one, or one that was merged since
    served: Parameters  # the one that engines draft with
    initial: Parameters  # the one that the run started with; never changes but when a run is resumed
    exported: Parameters | None = None  # a candidate that is about to be published; None: none is
    to_judge: bool = False  # the candidate waits for a session that scores it for the gate

    def merged(self, candidate: Parameters) -> DrafterVersions:
        return replace(self, candidate=candidate, to_judge=True)

    def judged(self) -> DrafterVersions:
        return replace(self, to_judge=False)

    def export(self) -> DrafterVersions:
        return replace(self, exported=self.candidate)

    def published(self) -> DrafterVersions:
        served = self.candidate if self.exported is None else self.exported
        return replace(self, served=served, exported=None, to_judge=self.to_judge and served is not self.candidate)

    def reverted(self, which: Literal["served", "initial"]) -> DrafterVersions:
        """The candidate is given up."""
        return replace(self, candidate=self.of(which), exported=None, to_judge=False)

    def resumed(self, candidate: Parameters, initial: Parameters) -> DrafterVersions:
        ahead = any(not np.array_equal(value, self.served[name]) for name, value in candidate.items())
        return replace(self, candidate=candidate, initial=initial, to_judge=ahead)

    def of(self, which: str) -> Parameters:
        return {name: getattr(self, name) for name in VERSIONS}[which]

    def copied(self) -> DrafterVersions:
        """A copy on its own memory: arrays out of Ray's object store are read-only and keep the whole object there."""
        return copy.deepcopy(self)  # in which one version in two roles stays one


def checksums(trainer: DrafterTrainer, versions: DrafterVersions) -> Resumed:
    """Checksums of what a worker holds now, to compare with those of a checkpoint's files."""
    return Resumed(
        steps=trainer.steps,
        candidate=checksum(trainer.averages()),
        served=checksum(versions.served),
        initial=checksum(versions.initial),
        moments=moments(trainer.optimizer.state_dict()),
    )


def moments(optimizer: Mapping[str, dict]) -> str:
    """Checksum of Adam's moments and step counts, from the optimizer's `state_dict()`."""
    states = optimizer["state"].items()
    return checksum({f"{i}.{name}": value for i, values in states for name, value in values.items() if name != AVERAGE})


def checksum(named: Mapping[str, torch.Tensor | np.ndarray]) -> str:
    """CRC-32 of names and numbers."""
    whole = 0
    for name in sorted(named):
        value = named[name]
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        whole = zlib.crc32(name.encode(), whole)
        whole = zlib.crc32(np.ascontiguousarray(array).reshape(-1).data.cast("B"), whole)
    return f"{whole:08x}"


# ---------------------------------------------------------------------- the merge


def start_merge(workers: Sequence[ActorHandle]) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """Have these workers merge; does not wait. (`MergeFacts`, all alike; slices for `SpotWorker.adopt`), as references.

    `FAN_IN` workers make a group, in which another one averages each slice, and `FAN_IN` groups one of the next level.
    """
    groups = [([worker], list(worker.hand_in.options(num_returns=FAN_IN).remote(FAN_IN))) for worker in workers]
    facts: list[ObjectRef] = []
    while not facts:
        last = len(groups) <= FAN_IN
        batches = [groups[i : i + FAN_IN] for i in range(0, len(groups), FAN_IN)]
        groups = []
        for batch in batches:
            members = [worker for below, _ in batch for worker in below]
            averages = []
            for part in range(FAN_IN):
                averager = members[part * len(members) // FAN_IN]  # evenly over the members, and so over their nodes
                call = averager.average.options(num_returns=2)
                averages.append(call.remote(*[row[part] for _, row in batch], last=last))
            groups.append((members, [average for _, average in averages]))
            if last:
                facts = [reference for reference, _ in averages]
    return facts, groups[0][1]


def session_facts(worker: str, tokens: int, steps: int, min_steps: int) -> MergeFacts:
    """One worker's hand-in as an average of itself, or as an exclusion: AdamW's first steps go by sign alone."""
    if steps < min_steps:
        return MergeFacts(0, (), {worker: f"{steps} optimizer steps, fewer than {min_steps}"})
    if tokens <= 0:
        return MergeFacts(0, (), {worker: "it trained on no tokens"})
    return MergeFacts(tokens, (worker,), longest=tokens, squares=tokens**2)


def hand_in(facts: MergeFacts, now: Parameters, base: Parameters, slices: int) -> list[MergedSlice]:
    """What a worker learned since the candidate that all agree on, in slices; with few blocks some are empty."""
    if not facts.included:
        return [_empty(facts)] * slices

    def change(block: Block, out: np.ndarray) -> None:
        name, begin, end = block
        np.subtract(now[name].reshape(-1)[begin:end], base[name].reshape(-1)[begin:end], out=out)

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda blocks: _packed(facts, blocks, change), _slices_of(base, slices)))
    except FloatingPointError as broken:
        return [_empty(MergeFacts(0, (), {facts.included[0]: str(broken)}))] * slices


def average_slice(parts: Sequence[MergedSlice], *, last: bool) -> MergedSlice:
    """The same slice of several workers or groups as their average, weighted by tokens; its bits depend on no order.

    The `last` one goes as far as the longest session did. A `ValueError` where a worker is in two, or lengths differ.
    """
    ordered = sorted(parts, key=lambda part: min((*part.facts.included, *part.facts.excluded)))
    facts = _combined([part.facts for part in ordered])
    usable = [part for part in ordered if part.facts.included]
    if not usable:
        return _empty(facts)
    if len({(part.values.size, part.lengths) for part in usable}) > 1:
        raise ValueError(f"Deltas of {', '.join(facts.included)} differ in length.")
    weights = [part.facts.tokens / facts.tokens for part in usable]
    lengths = usable[0].lengths
    ends, term = list(itertools.accumulate(lengths)), np.empty(max(lengths, default=0), np.float32)
    scales = zip(*(part.scales for part in usable), strict=True)  # of each block, by worker

    def average_of(block: Block, total: np.ndarray) -> None:
        _, begin, end = block
        total.fill(0.0)
        for weight, part, scale in zip(weights, usable, next(scales), strict=True):
            total += np.multiply(part.values[begin:end], np.float32(weight * scale), out=term[: end - begin])

    blocks = [("the average", end - length, end) for length, end in zip(lengths, ends, strict=True)]
    average = _packed(facts, blocks, average_of)
    if not last:
        return average
    further = facts.longest * facts.tokens / facts.squares  # than the plain average; 1 for equal sessions
    return replace(average, scales=average.scales * np.float32(further))


def _combined(parts: Sequence[MergeFacts]) -> MergeFacts:
    names = [name for part in parts for name in (*part.included, *part.excluded)]
    if len(set(names)) != len(names):
        raise ValueError(f"A worker hands in once per merge, but these did: {', '.join(names)}.")
    return MergeFacts(
        tokens=sum(part.tokens for part in parts),
        included=tuple(name for part in parts for name in part.included),
        excluded={name: reason for part in parts for name, reason in part.excluded.items()},
        longest=max(part.longest for part in parts),
        squares=sum(part.squares for part in parts),
    )


def added(base: Parameters, slices: Sequence[MergedSlice]) -> Parameters:
    """The new candidate, float32 on memory of its own; `base` itself where every worker was left out."""
    if not slices[0].facts.included:
        return base
    new = {name: np.empty(value.shape, np.float32) for name, value in base.items()}

    def fill(blocks: list[Block], part: MergedSlice) -> None:
        at = 0
        for (name, begin, end), scale in zip(blocks, part.scales, strict=True):
            after, out = at + end - begin, new[name].reshape(-1)[begin:end]
            np.multiply(part.values[at:after], scale, out=out)
            out += base[name].reshape(-1)[begin:end]
            at = after

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fill, _slices_of(base, len(slices)), slices))
    return new


Block = tuple[str, int, int]
"""(parameter, first number, number after the last) of a block."""


def _slices_of(like: Mapping[str, np.ndarray], slices: int) -> Iterator[list[Block]]:
    """The blocks of each slice, as evenly spread as they can be."""
    blocks = [(n, a, min(a + BLOCK, value.size)) for n, value in like.items() for a in range(0, value.size, BLOCK)]
    for i in range(slices):
        yield blocks[i * len(blocks) // slices : (i + 1) * len(blocks) // slices]


def _packed(facts: MergeFacts, blocks: Sequence[Block], fill: Callable[[Block, np.ndarray], None]) -> MergedSlice:
    """Blocks of numbers, one after the other, in 16 bits a number; a `FloatingPointError` where one is not finite.

    `fill` is called for each block in turn, with the memory for its numbers: the same each time, to stay in the cache.
    """
    lengths = tuple(end - begin for _, begin, end in blocks)
    packed = MergedSlice(facts, np.empty(sum(lengths), np.int16), np.empty(len(blocks), np.float32), lengths)
    buffer, at = np.empty(max(lengths, default=0), np.float32), 0
    for i, block in enumerate(blocks):
        numbers = buffer[: lengths[i]]
        fill(block, numbers)
        top = float(max(numbers.max(), -numbers.min()))
        if not np.isfinite(top):
            raise FloatingPointError(f"{block[0]} is not finite")
        packed.scales[i] = scale = top / LARGEST if top > TINY else 1.0
        numbers *= np.float32(1 / scale)
        np.rint(numbers, out=packed.values[at : at + len(numbers)], casting="unsafe")
        at += len(numbers)
    return packed


def _empty(facts: MergeFacts) -> MergedSlice:
    return MergedSlice(facts, np.empty(0, np.int16), np.empty(0, np.float32), ())
