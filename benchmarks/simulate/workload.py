"""What a simulated rollout generates, and how well the drafter guesses it.

Every token of every response carries one fixed random number, and a draft of it is accepted when that number is
below the acceptance of its draft position. So all policies meet the same easy and hard tokens, whatever K they
choose, and their makespans can be compared without averaging over luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIG16_VANILLA = (0.92, 0.783, 0.722, 0.692, 0.667, 0.667, 0.625, 0.6)
"""Conditional acceptance of TLT Fig. 16's drafter without adaptation (from 92, 72, 52, 36, 24, 16, 10, 6 %)."""
FIG16_ADAPTIVE = (0.96, 0.917, 0.886, 0.833, 0.769, 0.76, 0.737, 0.714)
"""The same after adaptation (from 96, 88, 78, 65, 50, 38, 28, 20 %)."""


def geometric(first: float, ratio: float = 0.97, positions: int = 8) -> tuple[float, ...]:
    """Conditional acceptance that starts at `first` and shrinks by `ratio` per position."""
    return tuple(first * ratio**i for i in range(positions))


@dataclass(frozen=True)
class Workload:
    """A series of rollouts on one engine."""

    requests: int
    """Responses per rollout."""
    acceptance: tuple[float, ...]
    """Conditional acceptance per draft position, before drift."""
    rollouts: int = 6
    max_batch: int = 256
    """Requests decoding at once; the others wait and join as places free up."""
    median_length: float = 1000.0
    length_sigma: float = 0.8
    """Spread of the log-normal response lengths: the long tail."""
    max_length: int = 4096
    prompt: int = 300
    """Prompt tokens of every request."""
    drift: Sequence[float] = (0.0,)
    """Relative change of acceptance per rollout, cycled: policy and drafter updates."""
    age_drift: float = 0.0
    """Relative change of acceptance from a response's first token to its 4096th."""
    request_sigma: float = 0.0
    """Relative spread of acceptance between requests."""
    seed: int = 0

    def rollout(self, index: int) -> Rollout:
        """Draw rollout `index`; the same for every policy."""
        rng = np.random.default_rng([self.seed, index])
        lengths = rng.lognormal(np.log(self.median_length), self.length_sigma, self.requests)
        whole = np.clip(lengths, 16, self.max_length).astype(np.int64)  # [requests]
        luck = rng.random((self.requests, int(whole.max()) + 32), dtype=np.float32)  # [requests, tokens]
        scale = 1.0 + self.drift[index % len(self.drift)] + self.request_sigma * rng.standard_normal(self.requests)
        return Rollout(whole, luck, scale, np.asarray(self.acceptance), self.age_drift)


@dataclass(frozen=True)
class Rollout:
    """One rollout's lengths, luck and acceptance."""

    lengths: npt.NDArray[np.int64]
    """Tokens each response will have, [requests]."""
    luck: npt.NDArray[np.float32]
    """One uniform number per token, [requests, tokens]."""
    scale: npt.NDArray[np.float64]
    """Acceptance of each request relative to the drafter's average, [requests]."""
    acceptance: npt.NDArray[np.float64]
    """Conditional acceptance per position at scale 1, [positions]."""
    age_drift: float

    def scales(self, rows: npt.NDArray[np.int64], done: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Acceptance of these requests at this age relative to the average, never above certainty, [rows]."""
        scale = self.scale[rows]
        if self.age_drift:
            scale = scale + self.age_drift * np.minimum(done / 4096.0, 1.0)
        top = max(float(self.acceptance.max(initial=0.0)), 1e-9)
        return np.clip(scale, 0.0, 0.99 / top)

    def accept_lengths(self, scales: npt.NDArray[np.float64], positions: int) -> npt.NDArray[np.float64]:
        """True τ(0..positions), averaged over requests of these scales, [positions + 1]."""
        powers = np.cumprod(np.broadcast_to(scales[:, None], (scales.size, positions)), axis=1).mean(axis=0)
        chain = np.cumprod(self.acceptance[:positions]) * powers  # [positions]
        return np.concatenate(([1.0], 1.0 + np.cumsum(chain)))

    def verify(
        self, rows: npt.NDArray[np.int64], done: npt.NDArray[np.int64], scales: npt.NDArray[np.float64], drafted: int
    ) -> npt.NDArray[np.bool_]:
        """Which draft tokens survive verification, [rows, drafted]: a prefix of each row is True."""
        tokens = done[:, None] + np.arange(drafted)  # [rows, drafted]
        luck = self.luck[rows[:, None], tokens]
        hit = luck < self.acceptance[:drafted] * scales[:, None]
        return np.logical_and.accumulate(hit, axis=1)
