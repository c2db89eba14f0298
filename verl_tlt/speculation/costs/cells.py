"""One cell of the latency model: what a load bucket and a draft length taught beyond the fitted shape.

A scalar Kalman filter on the log of measured over expected latency. Its companion, the machine's pace, is a second
one that all cells share; every sample is divided between the two by what each is unsure of.
"""

from __future__ import annotations

import math

_FIRST = 3
"""First samples, whose median is compared with what the neighbours suggest."""
_CLIP = 2.5
"""Huber's threshold in standard deviations: stalls are felt no more than this."""
_COARSE = 0.01
"""A cell is never known better than this: the shape is not exact across its width."""
_RESTART = 3
"""Samples in a row, all far off on the same side, after which the level is believed to be wrong and begins anew."""
_FAR_OFF = 0.4
"""Log ratio (or the clip) beyond which a sample is far off: more than a cell's loads differ, less than a stall."""
_PLAUSIBLE = 0.12
"""Log ratio (or 2.5 jitters) by which the first median may differ; beyond it the neighbours are disregarded."""


class Cell:
    """Log correction of a roofline at one place, robust against stalls.

    Args:
        draft_length: K of the cell, or OFF.
        prior: log correction its neighbours suggest.
        prior_sigma: how far off that may be; infinite when there are no neighbours.
        jitter: relative noise of a single step, as known so far.
    """

    __slots__ = (
        "batch", "draft_length", "first", "kv_tokens", "level",
        "prior", "prior_variance", "samples", "spread", "variance", "wide",
    )  # fmt: skip

    def __init__(self, draft_length: int, prior: float, prior_sigma: float, jitter: float) -> None:
        self.draft_length = draft_length
        self.level = self.prior = prior
        self.variance = self.prior_variance = prior_sigma**2
        self.spread = jitter
        self.samples = 0.0
        self.first: list[float] = []
        self.wide: list[float] = []
        self.batch, self.kv_tokens = 0.0, 0.0

    def learn(self, log_ratio: float, pace: float, pace_variance: float, memory: float) -> float:
        """Take in log(measured / shape).

        Args:
            log_ratio: the sample.
            pace: log slowness of the machine at present.
            pace_variance: of that.
            memory: samples after which older ones count 1/e.

        Returns:
            What the sample says about the pace: add it to the pace.
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
        if self._wrong(surprise, max(clip, _FAR_OFF), log_ratio - pace):
            return 0.0
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
        """Restate everything relative to a shape that changed by `-offset` here."""
        self.level += offset
        self.prior += offset
        self.first = [x + offset for x in self.first]
        self.wide = [x + offset for x in self.wide]

    def _wrong(self, surprise: float, border: float, value: float) -> bool:
        """Whether samples keep missing the level on one side; it then begins anew from them.

        A level that began with two stalls would otherwise stay: every true sample is clipped as an outlier.
        """
        if abs(surprise) <= border:
            self.wide.clear()
            return False
        if self.wide and (self.wide[-1] > self.level) != (surprise > 0.0):
            self.wide.clear()
        self.wide.append(value)
        if len(self.wide) < _RESTART:
            return False
        self.first, self.wide = self.wide, []
        self._begin()
        return True

    def _begin(self) -> None:
        """Level from one to three samples: their lower median, weighed against what the neighbours suggest.

        The lower median, because a first use may stall but never hurries, and the least where they do not agree; one
        very slow sample alone says nothing.
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
