"""EMA with hysteresis over tiers, as SGLang's adaptive speculation does it (PRs 21599, 24055), for comparison.

It follows the average number of accepted draft tokens: draft longer when nearly everything is accepted, shorter when
the shorter draft would have carried as much. It knows nothing of cost, has no off arm, and treats batch sizes apart
only by wide ranges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from verl_tlt.speculation.types import Load, Policy, Step


@dataclass(frozen=True)
class EmaSettings:
    thresholds: tuple[int, ...] = (1, 64, 128)
    """First batch size of each range, ascending from 1."""
    tiers: tuple[tuple[int, ...], ...] = ((1, 3, 7), (1, 2, 5), (1, 2, 3))
    """Draft lengths of each range, ascending; replaced by the nearest arm where an arm is missing."""
    weight: float = 0.2
    """Share of the newest step in the moving average."""
    up_margin: float = 0.5
    """Draft longer when the average exceeds the current length minus this."""
    down_margin: float = 0.25
    """Draft shorter when the average falls below the shorter length minus this."""
    hold: int = 4
    """Steps between changes."""


class EmaPolicy(Policy):
    """Tier by moving average of accepted draft tokens."""

    def __init__(self, arms: Sequence[int], settings: EmaSettings | None = None) -> None:
        self._set = settings or EmaSettings()
        drafting = [k for k in arms if k > 0] or [0]
        near = {k: min(drafting, key=lambda arm: (abs(arm - k), arm)) for tier in self._set.tiers for k in tier}
        self._tiers = [tuple(sorted({near[k] for k in tier})) for tier in self._set.tiers]
        self._level = [len(tier) // 2 for tier in self._tiers]
        self._average: list[float | None] = [None] * len(self._tiers)
        self._held = 0

    def choose(self, load: Load) -> int:
        """The current tier of the batch's range."""
        where = self._range(load.batch)
        return self._tiers[where][self._level[where]]

    def observe(self, step: Step) -> None:
        """Move the average and, every few steps, the tier."""
        if step.num_drafts <= 0 or step.verified <= 0:
            return
        where = self._range(step.batch)
        accepted = sum(step.num_accepted_tokens_per_pos) / step.num_drafts
        before = self._average[where]
        average = accepted if before is None else before + self._set.weight * (accepted - before)
        self._average[where] = average
        self._held -= 1
        if self._held > 0:
            return
        tier, level = self._tiers[where], self._level[where]
        if level + 1 < len(tier) and average > tier[level] - self._set.up_margin:
            self._level[where], self._held = level + 1, self._set.hold
        elif level > 0 and average < tier[level - 1] - self._set.down_margin:
            self._level[where], self._held = level - 1, self._set.hold

    def _range(self, batch: int) -> int:
        return max(bisect_right(self._set.thresholds, batch) - 1, 0)
