"""Whether the drafter runs at all in the coming rollout, or the engine decodes as stock (arm OFF).

At K=0 vLLM still runs a pass of the drafter in every step, which a drafter that cannot pay is not worth. The pass can
be skipped for a whole rollout only, because its KV cache must have no holes. So the question is put after each weight
sync, and answered from what is then known: acceptance on held-out text, step costs, where the last rollout spent its
time, and whether drafting lost time in it. Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs.latency_table import Table, interpolate
from verl_tlt.speculation.types import OFF

HOPELESS = 0.05
"""A drafter accepted less often than this nowhere pays, whatever a step costs: each draft token costs more than 5 %."""
WORTH = 0.97
"""Drafting must be expected to cut a rollout's time to this share before the drafter runs at all."""
UNTRIED = 0.9
"""The same while no drafter has run in this run: the estimate rests on short contexts and on text of older steps alone,
and a rollout is lost on finding out."""
BETTER = 1.05
"""After drafting lost time, a drafter must promise this much longer accept lengths to be tried again."""


class Profitability:
    """One engine's answer, rollout after rollout.

    Args:
        policy: `tlt.speculation.policy`.
        source: `tlt.speculation.source`; with "both" n-grams draft beside the drafter, whatever that is worth.
    """

    def __init__(self, policy: str, source: str = "eagle") -> None:
        self.policy = policy
        self._always = policy == "fixed" or (source == "both" and policy != "off")
        self.latency: Table = {}
        """Step costs, OFF included; empty: unknown."""
        self._work: dict[int, float] = {}
        self._lost = 0.0
        self._worth = UNTRIED

    def decide(self, acceptance: Sequence[float]) -> bool:
        """Whether the drafter shall run in the coming rollout.

        Args:
            acceptance: conditional acceptance per draft position, from held-out data; empty: unknown.
        """
        if self._always:
            return True
        worth = is_profitable(acceptance, self.latency, self.policy, self._work, self._worth)
        return worth and self._promise(acceptance) > BETTER * self._lost

    def learn(self, stats: EngineStats, drafting: bool, acceptance: Sequence[float]) -> None:
        """Take note of a rollout.

        Args:
            stats: its sums.
            drafting: whether the drafter ran in it.
            acceptance: what had been expected of it.
        """
        self._work = {work.batch: work.tokens for work in stats.work if work.tokens > 0} or self._work
        if drafting and stats.compared_s > 0.0:
            self._worth = WORTH
            lost = -stats.saved_s > (1.0 - WORTH) * stats.compared_s
            self._lost = self._promise(acceptance) if lost else 0.0

    def _promise(self, acceptance: Sequence[float]) -> float:
        """Accept length at the longest draft; that of an unknown drafter is as good as any."""
        return accept_lengths(acceptance, max(self.latency, default=1))[-1] if acceptance else 1.0


def is_profitable(
    acceptance: Sequence[float],
    latency: Table,
    policy: str,
    work: Mapping[int, float] | None = None,
    worth: float = WORTH,
) -> bool:
    """Whether drafting is expected to cut a rollout's time clearly.

    The expected time, with the best draft length at each batch, against OFF. Without measurements, or of an unknown
    drafter, drafting is tried: the policy finds out in a few steps.

    Args:
        acceptance: conditional acceptance per draft position, from held-out data; empty: unknown.
        latency: seconds by arm and batch, OFF included.
        policy: `tlt.speculation.policy`.
        work: tokens decoded at each batch in the last rollout; nothing: one that spends as long at each measured batch
            (batches are measured evenly in log scale, and a long-tailed rollout drains that way).
        worth: share of OFF's time that drafting must be expected to stay below.
    """
    if policy == "off":
        return False
    if policy == "fixed" or not acceptance:
        return True
    if max(acceptance) < HOPELESS:
        return False
    arms = [k for k in latency if k >= 0]
    if OFF not in latency or not arms:
        return True
    lengths, off = accept_lengths(acceptance, max(arms)), latency[OFF]

    def share(batch: int) -> float:
        """Time against OFF. A step with a drafter never takes less; where it was measured so, that was noise."""
        seconds = interpolate(off, batch)
        return min(max(interpolate(latency[k], batch) / seconds, 1.0) / lengths[k] for k in arms)

    if work:  # weighed by the seconds that stock would spend at each batch
        weights = {batch: produced / batch * interpolate(off, batch) for batch, produced in work.items()}
    else:
        weights = {batch: 1.0 for batch, _ in off}
    return sum(w * share(batch) for batch, w in weights.items()) < worth * sum(weights.values())


def accept_lengths(acceptance: Sequence[float], longest: int) -> list[float]:
    """τ(0..longest) from conditional acceptance per position; positions beyond the known repeat the last one."""
    lengths, chain = [1.0], 1.0
    for i in range(longest):
        chain *= acceptance[min(i, len(acceptance) - 1)]
        lengths.append(lengths[-1] + chain)
    return lengths
