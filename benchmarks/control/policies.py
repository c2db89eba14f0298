"""Policies of others, to compare `live_table` with: TLT's bandit and SGLang's tiers, with their settings.

A run takes one by `tlt.speculation.policy=benchmarks.control.policies:BanditPolicy`.
"""

import math
import random
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.types import Policy, Step

RIVALS = ("ema", "bandit")


def named(name: str, lengths: Sequence[int], largest_batch: int) -> Policy:
    """A policy of the package or one of `RIVALS`."""
    own = {"bandit": BanditPolicy, "ema": EmaPolicy}.get(name)
    return own(lengths, largest_batch) if own else make_policy(name, lengths, largest_batch)


class BanditPolicy(Policy):
    """BEG: the bucketed epsilon-greedy bandit of the TLT paper (arXiv 2511.16665, section 3.3).

    Each octave of batch sizes is a bucket with rewards of its own. The reward of a step is tokens per second, and a
    draft length's score the median over the last `window`. With probability `epsilon` any draft length is tried,
    otherwise the best; one without a reward is tried first. A decision is kept for `hold` steps: a draft is verified
    one step after it was made, so one step earns no clean reward. Unlike the paper's it may also choose K=0.

    The released code of TLT has one draft length per bucket, hence nothing to learn: a table by batch size.
    """

    def __init__(
        self,
        arms: Sequence[int],
        largest_batch: int = 0,
        seed: int = 0,
        epsilon: float = 0.1,
        window: int = 300,
        hold: int = 2,
    ) -> None:
        self._arms, self._epsilon, self._hold = sorted({*arms, 0}), epsilon, hold
        self._random = random.Random(seed)
        self._rewards: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=window))
        self._current, self._bucket, self._held = 0, -1, 0

    def choose(self, batch: int) -> int:
        """The bucket's best draft length by median reward, or any with probability ε."""
        bucket = _octave(batch)
        if self._held > 0 and bucket == self._bucket:
            self._held -= 1
            return self._current
        self._bucket, self._held = bucket, self._hold - 1
        if self._random.random() < self._epsilon:
            self._current = self._random.choice(self._arms)
        else:
            self._current = max(self._arms, key=lambda k: self._score(bucket, k))
        return self._current

    def _score(self, bucket: int, k: int) -> float:
        rewards = self._rewards[bucket, k]
        return median(rewards) if rewards else math.inf

    def observe(self, step: Step) -> None:
        """Reward of a steady step: tokens per second over the batch."""
        if step.clean and step.drafted == step.verified and step.latency_s > 0 and step.batch > 0:
            accept_length = 1.0 + sum(step.num_accepted_tokens_per_pos) / step.batch
            self._rewards[_octave(step.batch), step.verified].append(accept_length * step.batch / step.latency_s)


def _octave(batch: int) -> int:
    """Batch sizes of 128 and more are one."""
    return min(batch, 128).bit_length() - 1


BATCHES = (1, 64, 128)
"""First batch size of each range of SGLang's."""
TIERS = ((1, 3, 7), (1, 2, 5), (1, 2, 3))
"""Draft lengths of each range, ascending; replaced by the nearest arm where an arm is missing."""
UP_MARGIN, DOWN_MARGIN = 0.5, 0.25
"""Draft longer when the average exceeds the current length minus this, shorter below the shorter length minus this."""


class EmaPolicy(Policy):
    """EMA with hysteresis over tiers, as SGLang's adaptive speculation does it (PRs 21599, 24055).

    It follows the average number of accepted draft tokens: draft longer when nearly everything is accepted, shorter
    when the shorter draft would have carried as much. It knows nothing of cost, has no off arm, and treats batch sizes
    apart only by wide ranges. `weight` is the newest step's share in the average; `hold`: steps between changes.
    """

    def __init__(self, arms: Sequence[int], largest_batch: int = 0, weight: float = 0.2, hold: int = 4) -> None:
        self._weight, self._hold = weight, hold
        drafting = [k for k in arms if k > 0] or [0]
        near = {k: min(drafting, key=lambda arm: (abs(arm - k), arm)) for tier in TIERS for k in tier}
        self._tiers = [tuple(sorted({near[k] for k in tier})) for tier in TIERS]
        self._level = [len(tier) // 2 for tier in self._tiers]
        self._average: list[float | None] = [None] * len(self._tiers)
        self._held = 0

    def choose(self, batch: int) -> int:
        where = _range(batch)
        return self._tiers[where][self._level[where]]

    def observe(self, step: Step) -> None:
        """Move the average and, every few steps, the tier."""
        if step.num_drafts <= 0 or step.verified <= 0:
            return
        where = _range(step.batch)
        accepted = sum(step.num_accepted_tokens_per_pos) / step.num_drafts
        before = self._average[where]
        average = accepted if before is None else before + self._weight * (accepted - before)
        self._average[where] = average
        self._held -= 1
        if self._held > 0:
            return
        tier, level = self._tiers[where], self._level[where]
        if level + 1 < len(tier) and average > tier[level] - UP_MARGIN:
            self._level[where], self._held = level + 1, self._hold
        elif level > 0 and average < tier[level - 1] - DOWN_MARGIN:
            self._level[where], self._held = level - 1, self._hold


def _range(batch: int) -> int:
    return max(bisect_right(BATCHES, batch) - 1, 0)
