"""Captured sequences on their way from the actor's ranks to a spot worker, put together again where ranks share them.

With sequence, context or pipeline parallelism no rank of the actor sees a whole sequence: each sends what it has, and
the spot worker joins the parts. Nothing is gathered between the actor's ranks, so nothing there can wait for a rank
that failed: a sequence with a missing part is left out.

Which spot worker gets what is decided here, too. Ranks that compute the same sequences form a group; its sequences are
shared among all rollout replicas that its ranks belong to, for each of them has a spot worker to feed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Part:
    """What one rank holds of the captured window of one sequence."""

    row: int
    """Number of the sequence in its group's batch."""
    tokens: np.ndarray
    """int64 [L], the whole window's on every rank."""
    prompt_len: int
    """Tokens of the window that belong to the prompt."""
    start: int
    """Position of the window in the sequence."""
    last: int
    """The policy's number of layers: under it `states` holds what goes into the final norm."""
    stretches: tuple[tuple[int, int], ...]
    """Tokens [begin, end) of the window that this rank holds, in the order of the states' rows."""
    states: dict[int, np.ndarray] = field(default_factory=dict)
    """Inputs of layers, 16 bits [n, H] (see `to_numpy16`), of those this rank computes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(s.nbytes for s in self.states.values())


def join(ranks: Sequence[Sequence[Part]], aux_layers: Sequence[int]) -> tuple[list[dict[str, Any]], int]:
    """Whole sequences out of what every rank of one group sent.

    Args:
        ranks: each rank's parts.
        aux_layers: layers whose inputs the drafter reads.

    Returns:
        (sequences in row order, each {"tokens", "prompt_len", "start", "aux": 16-bit [L, 3H], "last": 16-bit [L, H]};
        how many were left out because a part is missing).
    """
    rows: dict[int, list[Part]] = {}
    for part in (part for parts in ranks for part in parts):
        rows.setdefault(part.row, []).append(part)
    joined = []
    for row in sorted(rows):
        parts = rows[row]
        head = parts[0]
        columns = {layer: _column(parts, layer) for layer in {*aux_layers, head.last}}
        if all(column is not None for column in columns.values()):
            joined.append(
                {
                    "tokens": head.tokens,
                    "prompt_len": head.prompt_len,
                    "start": head.start,
                    "aux": np.concatenate([columns[layer] for layer in aux_layers], axis=-1),
                    "last": columns[head.last],
                }
            )
    return joined, len(rows) - len(joined)


def _column(parts: Sequence[Part], layer: int) -> np.ndarray | None:
    """One layer's states [L, H] of a window; None where not every token's is there."""
    holders = [p for p in parts if layer in p.states]
    if not holders:
        return None
    length = len(holders[0].tokens)
    if holders[0].stretches == ((0, length),):
        return holders[0].states[layer]
    example = holders[0].states[layer]
    whole = np.empty((length, example.shape[-1]), example.dtype)
    known = np.zeros(length, bool)
    for part in holders:
        at = 0
        for begin, end in part.stretches:
            whole[begin:end] = part.states[layer][at : at + end - begin]
            known[begin:end] = True
            at += end - begin
    return whole if known.all() else None


def split(parts: Sequence[Part], shares: int) -> list[list[Part]]:
    """Parts for each of `shares` spot workers, by row: every rank of a group splits the same rows in the same way."""
    return [[p for p in parts if p.row % shares == share] for share in range(shares)]


@dataclass(frozen=True)
class Routes:
    """Where each rank's parts go."""

    shares: tuple[int, ...]
    """For each rank: among how many replicas its group's sequences are shared."""
    sources: Mapping[str, tuple[tuple[tuple[int, ...], int], ...]]
    """For each replica: (ranks of a group, which share of theirs) of every group it gets sequences from."""


def route(groups: Sequence[int], replicas: Mapping[str, Iterable[int]]) -> Routes:
    """Share each group's sequences among the replicas that its ranks belong to.

    Args:
        groups: for each rank, the number of its group (verl's data-parallel rank).
        replicas: for each replica, its ranks.
    """
    members: dict[int, list[int]] = {}
    for rank, group in enumerate(groups):
        members.setdefault(group, []).append(rank)
    touched = {g: [name for name, own in replicas.items() if set(own) & set(ranks)] for g, ranks in members.items()}
    sources: dict[str, list[tuple[tuple[int, ...], int]]] = {name: [] for name in replicas}
    for group, names in touched.items():
        for share, name in enumerate(names):
            sources[name].append((tuple(members[group]), share))
    shares = tuple(max(1, len(touched[group])) for group in groups)
    return Routes(shares, {name: tuple(found) for name, found in sources.items()})
