"""One cell of the latency model: what a load bucket and a draft length taught beyond the fitted shape."""

from __future__ import annotations

import math

_HOLD_BACK = 3
"""First samples judged by their median: the first use of a shape often compiles or allocates."""
_CLIP = 2.5
"""Huber's threshold in standard deviations."""
_PLAUSIBLE = 0.12
"""First samples this close to the neighbours (log ratio; or 2.5 jitters) are averaged with them, else replace them."""
_MOST_VOTES = 12.0
"""Samples that a neighbourhood is worth at most."""


class Cell:
    """Log correction of a roofline at one place, robust against stalls.

    Args:
        draft_length: K of the cell, or OFF.
        prior: log correction its neighbours suggest.
        prior_sigma: how far off that may be; infinite when there are no neighbours.
        jitter: relative noise of a single step, as known so far.
    """

    __slots__ = ("batch", "draft_length", "first", "kv_tokens", "level", "prior", "samples", "spread", "votes")

    def __init__(self, draft_length: int, prior: float, prior_sigma: float, jitter: float) -> None:
        self.draft_length = draft_length
        self.level = self.prior = prior
        self.votes = min((jitter / prior_sigma) ** 2, _MOST_VOTES)
        self.spread = jitter
        self.samples = 0.0
        self.first: list[float] = []
        self.batch, self.kv_tokens = 0.0, 0.0

    def learn(self, log_ratio: float, memory: float, share: float = 1.0) -> float:
        """Take in log(measured / shape), the common pace removed.

        Args:
            log_ratio: the sample.
            memory: samples after which older ones count 1/e.
            share: part of the surprise that is put down to this cell.

        Returns:
            The clipped surprise; 0.0 while the cell is young.
        """
        self.samples = min(self.samples + 1.0, memory)
        if len(self.first) < _HOLD_BACK:
            self.first.append(log_ratio)
            self.level = self._first_level()
            return 0.0
        surprise, clip = log_ratio - self.level, _CLIP * self.spread
        clipped = max(-clip, min(clip, surprise))
        # 1.3 keeps the scale estimate unbiased under the clip for Gaussian noise; stalls move it little.
        self.spread = max(self.spread + 0.05 * (1.3 * min(abs(surprise), 2.0 * clip) - self.spread), 0.002)
        self.level += share * clipped / min(self.samples + self.votes, memory)
        return clipped

    def sigma(self) -> float:
        """Uncertainty of the level."""
        young = 0.0 if len(self.first) == _HOLD_BACK else 0.02
        return self.spread / math.sqrt(self.samples + self.votes) + young

    def place(self, batch: float, kv_tokens: float) -> None:
        """Move the cell's centre towards a sample's load."""
        share = 1.0 / self.samples
        self.batch += share * (batch - self.batch)
        self.kv_tokens += share * (kv_tokens - self.kv_tokens)

    def shift(self, offset: float) -> None:
        """Restate everything relative to a shape that changed by `-offset` here."""
        self.level += offset
        self.prior += offset
        self.first = [x + offset for x in self.first]

    def _first_level(self) -> float:
        # The lower median: a stalled first sample is forgotten as soon as there is a second.
        level = sorted(self.first)[(len(self.first) - 1) // 2]
        if self.votes == 0.0:
            return level
        plausible = max(_PLAUSIBLE, _CLIP * self.spread)
        if abs(level - self.prior) < plausible:
            return level + (self.prior - level) * self.votes / (self.votes + self.samples)
        if len(self.first) == 1:
            # Stalls lengthen steps and nothing shortens them: a single slow sample is believed in part only.
            return min(level, self.prior + plausible)
        self.votes = 0.0
        return level
