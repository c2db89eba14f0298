"""Which spot worker gets what from which rank of the actor: captured sequences, and the policy's verifier weights.

Ranks of the actor that compute the same sequences form a group; its sequences are shared among the spot workers on its
ranks' devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardRoutes:
    """What each rank sends, and what each spot worker receives."""

    shares: tuple[int, ...]
    """For each rank: among how many replicas its group's sequences are shared."""
    sources: Mapping[str, tuple[tuple[tuple[int, ...], int], ...]]
    """For each replica: (ranks of a group, which share of theirs) of every group it gets sequences from."""


def route(groups: Sequence[int], replicas: Mapping[str, Iterable[int]]) -> ShardRoutes:
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
    return ShardRoutes(shares, {name: tuple(found) for name, found in sources.items()})


def capture_ranks(replicas: Mapping[str, Sequence[int]], nodes: Sequence[str]) -> dict[str, int]:
    """For each replica the rank that copies the verifier weights for it: the same for all whose workers share a node.

    Args:
        replicas: for each replica, its ranks; its spot worker is where the first one is.
        nodes: for each rank, its node.
    """
    first: dict[str, int] = {}
    return {name: first.setdefault(nodes[own[0]], own[0]) for name, own in replicas.items()}
