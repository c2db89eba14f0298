"""Does drafting save time? Who decodes a whole rollout without it, for the others to be compared with.

Every N steps one replica decodes a whole rollout without the drafter. Its steps are what `tlt/saved_s` compares with
from then on (`speculation.baseline`), and the others' time in this very rollout is compared with what that replica
needed at the same loads.

Replicas that share a machine slow each other down, and one that drafts does so by less than one that does not: there
all decode without, and in every other audit nobody trains beside them, as in stock. Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_tlt.speculation.baseline import between
from verl_tlt.speculation.costs.latency_table import stock_share
from verl_tlt.speculation.costs.tables import StockPoint

ENOUGH = 0.5
"""Least share of the others' decoding time at loads the audited replica has seen too; below it nothing is reported."""

Work = Sequence[Sequence[float]]
"""Decode-only engine steps of one rollout, summed by batch: (batch, seconds, tokens)."""


@dataclass(frozen=True)
class Audit:
    """What is asked of one rollout."""

    replicas: Sequence[str] = ()
    """Those that decode it as stock would; empty: it is not audited."""
    quiet: bool = False
    """Nobody trains beside it either."""


def audit_of(step: int, replicas: Sequence[str], every: int, shared: bool) -> Audit:
    """The audit of a step's rollout: of each replica in turn, of all on a shared machine; none in most steps.

    Args:
        step: RL step of the rollout.
        replicas: all of them, in a fixed order; one alone has nobody to be compared with.
        every: steps from one audit to the next; 0: never.
        shared: the replicas share a machine.
    """
    if every <= 0 or step % every or len(replicas) < 2:
        return Audit()
    turn = step // every
    return Audit(tuple(replicas), quiet=turn % 2 == 1) if shared else Audit((replicas[turn % len(replicas)],))


def audit_saving(stock: Work, others: Sequence[Work], vllm: Sequence[StockPoint] = ()) -> tuple[float, float] | None:
    """What drafting saved, measured against a replica that decoded the same rollout without it.

    Stock needs one step of batch b for every b tokens; what such a step takes is what the audited replica's steps took.
    Only batches are compared that lie within those the audited replica had.

    Args:
        stock: the audited replica's work.
        others: that of the replicas which drafted.
        vllm: what stock vLLM takes of a step without the drafter, where it was measured.

    Returns:
        (share of stock's seconds that was saved, negative if lost; share of the others' seconds that was compared),
        or None where too little can be compared.
    """
    step_s = sorted((batch, seconds * batch / tokens) for batch, seconds, tokens in stock if tokens > 0)
    every = [row for work in others for row in work if row[2] > 0]
    if not step_s or not every:
        return None
    low, high = step_s[0][0], step_s[-1][0]
    compared = [row for row in every if low <= row[0] <= high]
    spent, total = sum(row[1] for row in compared), sum(row[1] for row in every)
    if not spent or spent < ENOUGH * total:
        return None
    stock_s = sum(tokens / batch * between(step_s, batch) * stock_share(vllm, batch) for batch, _, tokens in compared)
    return 1.0 - spent / stock_s, spent / total
