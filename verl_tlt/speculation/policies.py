"""The policies that learn nothing, and every policy by its name in `tlt.speculation.policy`."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.goodput import GoodputPolicy
from verl_tlt.speculation.types import ControlError, Load, Policy

POLICIES = ("goodput", "table", "fixed", "off")
"""Names `make_policy` knows."""


class FixedPolicy(Policy):
    """Always the same K (0: the policy `off`)."""

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def choose(self, load: Load) -> int:
        return self._draft_length


class TablePolicy(Policy):
    """argmax τ(K) / T(batch, kv, K) over a measured table and a given acceptance; without both it drafts nothing."""

    def __init__(self, lengths: Sequence[int], active_share: float = 1.0) -> None:
        self._lengths, self._active_share = tuple(lengths), active_share
        self._usable: tuple[int, ...] = (0,)
        self._latency: LatencyModel | None = None
        self._tau: Sequence[float] | None = None

    def choose(self, load: Load) -> int:
        if self._latency is None or self._tau is None:
            return 0
        tau, seconds = self._tau, self._latency.predict(load.batch, load.kv_tokens)[1:]
        return max(zip(self._usable, seconds, strict=True), key=lambda length: tau[length[0]] / length[1])[0]

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        self._tau = expected_accept_lengths(conditional, self._lengths[-1])

    def set_latency(self, table: LatencyTable) -> None:
        measured = set(table.lengths())
        self._usable = tuple(k for k in self._lengths if k in measured)
        known = LatencyModel(self._usable, table=table, active_share=self._active_share) if 0 in self._usable else None
        self._latency = known


def make_policy(name: str, lengths: tuple[int, ...], fixed: int | None = None, active_share: float = 1.0) -> Policy:
    """Build one of `POLICIES` for ascending draft lengths; a ControlError names what it cannot be built with.

    `fixed` is the K of policy "fixed", None: the longest; `active_share` as in `Roofline`.
    """
    if name == "goodput":
        return GoodputPolicy(lengths, active_share)
    if name == "table":
        return TablePolicy(lengths, active_share)
    if name == "off":
        return FixedPolicy(0)
    if name != "fixed":
        raise ControlError(f"Speculation policy {name!r} does not exist; known: {', '.join(POLICIES)}.")
    draft_length = lengths[-1] if fixed is None else fixed
    if draft_length not in lengths:
        raise ControlError(f"Speculation setting fixed={draft_length} is none of the draft lengths {list(lengths)}.")
    return FixedPolicy(draft_length)
