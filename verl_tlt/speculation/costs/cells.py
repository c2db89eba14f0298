"""One cell of the latency model: the correction of the roofline at one load and draft length, robust against stalls.

A scalar Kalman filter on log(measured / roofline). The machine's pace, which all cells share, is estimated beside it;
every sample is divided between the two by the uncertainty of each.
"""

from __future__ import annotations

import math

_FIRST = 3
"""First samples, whose median is compared with what the neighbours suggest."""
_CLIP = 2.5
"""Huber's threshold in standard deviations: a stall counts as no more than this."""
_COARSE = 0.01
"""Least uncertainty of a cell: the roofline is not exact across its width."""
_FAR_OFF = 0.4
"""Log ratio (or `2 * _CLIP` jitters) by which first samples may differ from each other."""
_PLAUSIBLE = 0.12
"""Log ratio (or `_CLIP` jitters) by which the median of the first samples may differ from the neighbours."""


class Cell:
    """Log correction of a roofline at one place.

    Args:
        draft_length: K, or OFF.
        prior: log correction that its neighbours suggest.
        prior_sigma: standard deviation of that; infinite without neighbours.
        jitter: relative noise of a single step, as known so far.
    """

    __slots__ = (
        "batch", "draft_length", "first", "kv_tokens", "level",
        "prior", "prior_variance", "samples", "spread", "variance",
    )  # fmt: skip

    def __init__(self, draft_length: int, prior: float, prior_sigma: float, jitter: float) -> None:
        self.draft_length = draft_length
        self.level = self.prior = prior
        self.variance = self.prior_variance = prior_sigma**2
        self.spread = jitter
        self.samples = 0.0
        self.first: list[float] = []
        self.batch, self.kv_tokens = 0.0, 0.0

    def learn(self, log_ratio: float, pace: float, pace_variance: float, memory: float) -> float:
        """Take in one sample; returns what to add to the pace.

        Args:
            log_ratio: log(measured / roofline).
            pace: log slowness of the machine at present.
            pace_variance: of that.
            memory: samples after which older ones count 1/e.
        """
        self.samples = min(self.samples + 1.0, memory)
        if len(self.first) < _FIRST:
            self.first.append(log_ratio - pace)
            self._begin()
            return 0.0
        surprise = log_ratio - pace - self.level
        expected = self.spread**2 + pace_variance + self.variance
        clip = _CLIP * math.sqrt(expected)
        clipped = max(-clip, min(clip, surprise))
        # 1.3 keeps the scale estimate unbiased under the clip for Gaussian noise; stalls move it little.
        self.spread = max(self.spread + 0.05 * (1.3 * min(abs(surprise), 2.0 * clip) - self.spread), 0.002)
        self.level += self.variance / expected * clipped
        self.variance = max(self.variance - self.variance**2 / expected, self.spread**2 / memory, _COARSE**2)
        return pace_variance / expected * clipped

    def sigma(self) -> float:
        """Uncertainty of the level."""
        return math.sqrt(self.variance) + (0.02 if len(self.first) < _FIRST else 0.0)

    def place(self, batch: float, kv_tokens: float) -> None:
        """Move the cell's centre towards a sample's load."""
        share = 1.0 / max(1.0, self.samples)
        self.batch += share * (batch - self.batch)
        self.kv_tokens += share * (kv_tokens - self.kv_tokens)

    def shift(self, offset: float) -> None:
        """Restate everything relative to a roofline that changed by `-offset` here."""
        self.level += offset
        self.prior += offset
        self.first = [x + offset for x in self.first]

    def _begin(self) -> None:
        """Level from one to three samples: their lower median, weighed against what the neighbours suggest.

        The lower median, because a first use may stall but is never too fast, and the least where the samples do not
        agree. One very slow sample alone changes nothing.
        """
        count, ordered = len(self.first), sorted(self.first)
        agree = ordered[-1] - ordered[0] <= max(_FAR_OFF, 2.0 * _CLIP * self.spread)
        median, noise = ordered[(count - 1) // 2 if agree else 0], self.spread**2 / (count if agree else 1)
        plausible = max(_PLAUSIBLE, _CLIP * self.spread)
        if not math.isfinite(self.prior_variance):
            self.level, self.variance = median, noise
        elif abs(median - self.prior) < plausible:
            trust = self.prior_variance / (self.prior_variance + noise)
            self.level, self.variance = self.prior + trust * (median - self.prior), trust * noise
        elif count == 1 and median > self.prior:  # a stall, most likely: the next one will tell
            self.level, self.variance = self.prior, max(self.prior_variance, noise)
        else:
            self.level, self.variance = median, noise
