"""The shape of an engine step's latency: a non-negative sum of costs, fitted to what was measured.

A decoding step pays a fixed price, reads the KV cache, verifies batch·(K+1) tokens and runs the drafter K times.
Verification is flat while memory-bound and rises once compute-bound, a convex curve, so it is spelled as a sum of
hinges. All weights are non-negative: the shape can only rise with batch, KV tokens and K, which is what makes it
safe to extrapolate from a handful of measurements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_KNEES = (0.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
"""Verified tokens at which compute may start to cost extra."""
_KV_UNIT = 1e-5
_TOKEN_UNIT = 1e-2
FEATURES = 4 + len(_KNEES)
_RIDGE = np.array([1e-5, 1e-4, 1e-2, 1e-2] + [1e-4] * len(_KNEES))
"""Decides between explanations the data cannot tell apart. Extra cost of a draft seen at one batch size only is put
down to its tokens, not to the drafter's passes: at smaller batches drafting then looks cheap and gets measured."""


def features(batch: float, kv_tokens: float, draft_length: int) -> list[float]:
    """Cost drivers of one step: constant, KV tokens, drafter ran, drafter passes, tokens beyond each knee."""
    passes = max(draft_length, 0)
    tokens = batch * (passes + 1)
    row = [1.0, kv_tokens * _KV_UNIT, float(draft_length >= 0), float(passes)]
    row += [(tokens - knee) * _TOKEN_UNIT if tokens > knee else 0.0 for knee in _KNEES]
    return row


class Roofline:
    """Non-negative least squares over `features`, in relative error, warm-started at every fit."""

    def __init__(self) -> None:
        self.weights: list[float] = [0.0] * FEATURES

    def seconds(self, batch: float, kv_tokens: float, draft_length: int) -> float:
        """Latency by shape alone; 0.0 before the first fit."""
        return self.without_kv(batch, draft_length) + self.kv_token_s * kv_tokens

    @property
    def kv_token_s(self) -> float:
        """Seconds per token of KV cache."""
        return self.weights[1] * _KV_UNIT

    def without_kv(self, batch: float, draft_length: int) -> float:
        """The part of the latency that does not depend on KV tokens."""
        passes = draft_length if draft_length > 0 else 0
        tokens = batch * (passes + 1)
        w = self.weights
        total = w[0] + w[3] * passes
        if draft_length >= 0:
            total += w[2]
        for knee, weight in zip(_KNEES, w[4:], strict=True):
            if tokens <= knee:
                break
            total += weight * (tokens - knee) * _TOKEN_UNIT
        return total

    def fit(
        self,
        rows: Sequence[tuple[float, float, int]],
        seconds: Sequence[float],
        votes: Sequence[float],
        sweeps: int = 12,
    ) -> None:
        """Refit by coordinate descent.

        Args:
            rows: (batch, KV tokens, K) per measurement.
            seconds: latency of each.
            votes: weight of each in the sum of squared relative errors.
            sweeps: passes over the weights; few suffice because the last fit is the start.
        """
        target: npt.NDArray[np.float64] = np.asarray(seconds)  # [n]
        root = np.sqrt(np.asarray(votes))  # [n]
        design = np.array([features(*row) for row in rows]) * (root / target)[:, None]  # [n, FEATURES]
        gram = design.T @ design  # [FEATURES, FEATURES]
        gram[np.diag_indices(FEATURES)] += _RIDGE * np.maximum(np.diag(gram), 1e-9)
        right = (design.T @ root).tolist()  # [FEATURES]; relative error: every target is 1
        self.weights = _descend(gram.tolist(), right, self.weights, sweeps)


def _descend(gram: list[list[float]], right: list[float], start: list[float], sweeps: int) -> list[float]:
    w = list(start)
    for _ in range(sweeps):
        for i, row in enumerate(gram):
            if row[i] <= 1e-11:
                continue
            residual = right[i] - sum(map(float.__mul__, row, w)) + row[i] * w[i]
            w[i] = residual / row[i] if residual > 0 else 0.0
    return w
