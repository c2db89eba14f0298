"""BEG: the bucketed epsilon-greedy bandit of the TLT paper (arXiv 2511.16665, section 3.3), for comparison.

Draft lengths are grouped by the tokens they make the target verify, long ones for small batches; each batch bucket
owns some of them; the reward of a step is tokens per second and an arm's score the median over a window. With
probability ε any arm of the bucket is tried, otherwise the best. An arm without a reward is tried first.

The released code of TLT has one arm per bucket, hence nothing to learn: a lookup table, which settings reproduce.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from verl_tlt.speculation.types import Load, Policy, Step


@dataclass(frozen=True)
class BanditSettings:
    thresholds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """First batch size of each bucket, ascending from 1."""
    arms_per_bucket: int | None = None
    """Draft lengths each bucket may use, around its own group; null: all of them."""
    off_arm: bool = True
    """Whether every bucket may also choose K=0 (the paper's bandit cannot)."""
    off_above: int | None = None
    """No drafting above this batch size (the paper's elastic activation, 32 there); null: the bandit decides."""
    epsilon: float = 0.1
    """Share of decisions that try any arm of the bucket."""
    window: int = 300
    """Rewards an arm remembers per bucket."""
    hold: int = 2
    """Steps a decision is kept: a draft is verified one step after it was made, so one step earns no clean reward."""


class BanditPolicy(Policy):
    """One epsilon-greedy bandit per batch bucket."""

    def __init__(self, arms: Sequence[int], settings: BanditSettings | None = None, seed: int = 0) -> None:
        self._set = settings or BanditSettings()
        self._random = random.Random(seed)
        self._buckets = _buckets(arms, self._set)
        self._rewards = [{k: _Window(self._set.window) for k in bucket} for bucket in self._buckets]
        self._current, self._bucket, self._held = 0, -1, 0

    def choose(self, load: Load) -> int:
        """The bucket's best arm by median reward, or any of them with probability ε."""
        if self._set.off_above is not None and load.batch > self._set.off_above:
            self._held = 0
            return 0
        bucket = bisect_right(self._set.thresholds, load.batch) - 1
        if self._held > 0 and bucket == self._bucket:
            self._held -= 1
            return self._current
        self._bucket, self._held = bucket, self._set.hold - 1
        self._current = self._select(bucket)
        return self._current

    def observe(self, step: Step) -> None:
        """Reward of a steady step: tokens per second over the batch."""
        if not step.clean or step.drafted != step.verified or step.latency_s <= 0 or step.batch <= 0:
            return
        window = self._rewards[bisect_right(self._set.thresholds, step.batch) - 1].get(step.verified)
        if window is not None:
            accept_length = 1.0 + sum(step.num_accepted_tokens_per_pos) / step.batch
            window.push(accept_length * step.batch / step.latency_s)

    def _select(self, bucket: int) -> int:
        arms = self._buckets[bucket]
        if len(arms) == 1:
            return arms[0]
        if self._random.random() < self._set.epsilon:
            return self._random.choice(arms)
        rewards = self._rewards[bucket]
        return max(arms, key=lambda k: rewards[k].score())


class _Window:
    """Median of the latest rewards, kept sorted so that reading it is free."""

    def __init__(self, size: int) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._size = size

    def push(self, reward: float) -> None:
        self._latest.append(reward)
        insort(self._sorted, reward)
        if len(self._latest) > self._size:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def score(self) -> float:
        """The median; infinite before the first reward, so that every arm is tried."""
        n = len(self._sorted)
        if n == 0:
            return float("inf")
        return 0.5 * (self._sorted[n // 2] + self._sorted[(n - 1) // 2])


def _buckets(arms: Sequence[int], settings: BanditSettings) -> list[tuple[int, ...]]:
    """Arms of each bucket: groups by verify count, longest for the smallest batches, widened to neighbours."""
    groups = sorted((k for k in arms if k > 0), reverse=True)
    count = len(settings.thresholds)
    width = len(groups) if settings.arms_per_bucket is None else min(settings.arms_per_bucket, len(groups))
    buckets = []
    for i in range(count):
        centre = round(i * (len(groups) - 1) / max(count - 1, 1))
        first = max(0, min(centre - (width - 1) // 2, len(groups) - width))
        chosen = groups[first : first + width] or [0]
        buckets.append(tuple(sorted({*chosen, 0} if settings.off_arm else set(chosen))))
    return buckets
