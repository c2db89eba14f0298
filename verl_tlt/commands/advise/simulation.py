"""Simulated rollouts of a whole run: every response is decoded by stock verl and with TLT, at computed step costs.

A rollout is a series of segments in which an engine does the same in every step: each ends where the batch has changed
by `GRAIN` or the contexts have grown by `GROWTH`. In a segment the draft length is the one with the most tokens per
second, as the goodput policy chooses, and in every step a request gains the accept length expected at its own
acceptance. Left out are what the policy's learning costs and the luck of single tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from verl_tlt.errors import TLTError
from verl_tlt.speculation.types import OFF

SMALL_BATCH = 32
"""Requests in an engine below which a rollout counts as its tail (the TLT paper's threshold)."""
GRAIN = 1.0 / 32.0
"""Relative change of the batch at which a segment ends: the policy treats less as the same load."""
GROWTH = 0.25
"""Relative growth of the mean context at which a segment ends."""

STANDARD_NORMAL = NormalDist()

Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]
StepSeconds = Callable[[int, int, int], float]
"""Seconds of a step by batch, tokens of context in all requests, and draft length (OFF: no drafter)."""


@dataclass(frozen=True)
class EngineSpec:
    step_seconds: StepSeconds
    arms: tuple[int, ...] = (0, 1, 3)
    max_batch: int = 256
    """Requests decoding at once (`max_num_seqs`); the others wait."""
    kv_tokens: float = math.inf
    """Tokens of context that the KV cache holds: what does not fit waits."""
    prefill_token_s: float = 0.0
    spread: float = 0.0
    """Relative standard deviation of acceptance between requests."""


@dataclass
class Decoded:
    seconds: float = 0.0
    """Seconds until the replica's last response; 0 where it had none."""
    seconds_by_batch: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of decoding by batch, rounded down to a power of two."""


def rollout(
    spec: EngineSpec, lengths: Lengths, prompt: int, acceptance: tuple[float, ...], rng: np.random.Generator
) -> tuple[Decoded, Decoded]:
    """One rollout of a replica, decoded by (stock, TLT); TLT does not run a drafter that does not pay.

    `lengths`: tokens of the responses, [requests]; `prompt`: tokens of each prompt.
    """
    stock = decode(spec, lengths, prompt)
    drafted = decode(spec, lengths, prompt, step_gains(spec, acceptance, lengths.size, rng))
    return stock, min(stock, drafted, key=lambda decoded: decoded.seconds)


def step_gains(
    spec: EngineSpec, acceptance: tuple[float, ...], requests: int, rng: np.random.Generator | None = None
) -> Floats:
    """Tokens that each request gains in a step by draft length 0, 1, ..., [requests, K_max + 1]."""
    drawn = rng.standard_normal(requests) if rng is not None and spec.spread else np.zeros(requests)
    scale = np.clip(1.0 + spec.spread * drawn, 0.0, None)
    chain = np.clip(scale[:, None] * np.asarray(acceptance), 0.0, 1.0).cumprod(axis=1)  # [requests, K_max]
    return 1.0 + np.pad(chain.cumsum(axis=1), ((0, 0), (1, 0)))


def decode(spec: EngineSpec, lengths: Lengths, prompt: int, gains: Floats | None = None) -> Decoded:
    """Decode all responses as stock, or with the `step_gains` of a drafter that runs all the time."""
    decoded = Decoded(seconds=lengths.size * prompt * spec.prefill_token_s)
    left = lengths.astype(np.float64)  # tokens to go, [requests]
    queue = np.arange(lengths.size)  # requests that are not done, those that decode first
    while queue.size:
        contexts = prompt + (lengths - left)[queue[: spec.max_batch]]
        # Those decode whose contexts fit in the middle of the segment, one at least.
        batch = max(1, int((contexts.cumsum() * (1.0 + GROWTH / 2) <= spec.kv_tokens).sum()))
        rows = queue[:batch]  # requests that decode, [batch]
        kv = round(float((lengths[rows] - left[rows]).sum())) + batch * prompt
        k = OFF
        if gains is not None:  # the draft length with the most tokens per second
            mean = gains[rows].mean(axis=0)  # tokens a step by draft length, [K_max + 1]
            speeds = {length: float(mean[length]) / spec.step_seconds(batch, kv, length) for length in spec.arms}
            k = max(speeds, key=speeds.__getitem__)
        gain = np.ones(batch) if gains is None else gains[rows, k]  # tokens a step, [batch]
        needed = left[rows] / gain  # steps each request still takes, [batch]
        ending = min(batch, max(1, round(batch * GRAIN)))
        steps = float(np.partition(needed, ending - 1)[ending - 1])
        if batch == queue.size or ending < batch:
            steps = min(steps, max(1.0, GROWTH * (kv / batch + 64.0) / float(gain.mean())))
        middle = max(1, round(float(np.clip(needed / steps, 0.0, 1.0).sum())))  # mean batch of the segment
        gained = np.minimum(gain * steps, left[rows])
        middle_kv = round(kv * middle / batch + 0.5 * float(gained.sum()))
        seconds = steps * spec.step_seconds(middle, middle_kv, k)
        decoded.seconds += seconds
        decoded.seconds_by_batch[1 << (middle.bit_length() - 1)] += seconds
        left[rows] -= gained
        queue = queue[left[queue] > 1e-9]
    return decoded


@dataclass(frozen=True)
class SimulatedRollout:
    """Means over the rollouts of a simulated run; seconds."""

    tokens: float
    stock_s: float
    """Stock's rollout, until the last replica is done."""
    rollout_s: float
    """TLT's rollout, until the last replica is done."""
    tail_share: float
    """Share of stock's decoding time at batches below `SMALL_BATCH`."""
    bubble_share: float
    """Share of all replicas' time in stock's rollout in which they have nothing to decode."""

    @property
    def speed(self) -> float:
        return self.stock_s / self.rollout_s


def simulate(
    engine: EngineSpec, replicas: int, requests: int, lengths: LogNormal, acceptance: tuple[float, ...],
    prompt: int = 512, steps: int = 1, seed: int = 0,
) -> SimulatedRollout:  # fmt: skip
    """Simulate `steps` rollouts with a drafter that stays as it is; the same seed gives the same result.

    `requests` are all replicas', one for each at least; `acceptance` is conditional, by draft position.
    """
    rollouts = []
    for step in range(1, steps + 1):
        rng = np.random.default_rng([seed, step])
        drawn = lengths.draw(rng, requests)
        shares = [drawn[i::replicas] for i in range(replicas)]  # as even as verl's balancer deals them out
        pairs = [rollout(engine, share, prompt, acceptance, rng) for share in shares]
        stock, tlt = zip(*pairs, strict=True)
        stock_s, rollout_s = (max(replica.seconds for replica in decoded) for decoded in (stock, tlt))
        bubble_share = 1.0 - sum(s.seconds for s in stock) / (stock_s * len(stock))
        by_batch = [item for replica in stock for item in replica.seconds_by_batch.items()]
        tail_s = sum(seconds for batch, seconds in by_batch if batch < SMALL_BATCH)
        tail_share = tail_s / sum(seconds for _, seconds in by_batch)
        rollouts.append((drawn.sum(), stock_s, rollout_s, tail_share, bubble_share))
    return SimulatedRollout(*(float(mean) for mean in np.mean(rollouts, axis=0)))


# ---------------------------------------------------------------------- response lengths


@dataclass(frozen=True)
class LogNormal:
    """Log-normal response lengths in tokens, cut at `longest`."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    longest: int

    def draw(self, rng: np.random.Generator, requests: int) -> Lengths:
        drawn = rng.lognormal(math.log(self.median), self.sigma, requests)
        return np.clip(drawn, 1, self.longest).astype(np.int64)

    def mean(self) -> float:
        """Mean length in tokens, cut responses included."""
        mu = math.log(self.median)
        z = (math.log(self.longest) - mu) / self.sigma
        below = math.exp(mu + 0.5 * self.sigma**2) * STANDARD_NORMAL.cdf(z - self.sigma)
        return below + self.longest * (1.0 - STANDARD_NORMAL.cdf(z))


def from_mean(mean: float, sigma: float, limit: int) -> LogNormal:
    """The distribution of this spread, cut at `limit`, that has this mean."""
    median = _bisect(lambda median: LogNormal(median, sigma, limit).mean() < mean, 1e-3, 4.0 * limit)
    return LogNormal(median, sigma, limit)


def from_moments(mean: float, longest: float, clipped: float, requests: int, limit: int) -> LogNormal:
    """The distribution with the mean and the longest response of steps of so many `requests`, as a run logged them.

    Where a share of all responses is `clipped` at the `limit`, that share decides in place of the longest one.
    """
    if not 1 <= mean <= limit:
        raise TLTError(f"A mean response length of {mean:g} does not fit a limit of {limit} tokens.")
    share, edge = (clipped, limit) if clipped > 0 else (1.0 / max(requests, 2), min(longest, limit))
    z = STANDARD_NORMAL.inv_cdf(1.0 - min(max(share, 1e-7), 0.5))

    def with_spread(sigma: float) -> LogNormal:
        """The distribution of this spread in which a `share` of all responses is longer than `edge`."""
        return LogNormal(edge * math.exp(-z * sigma), sigma, limit)

    # a larger sigma with the same upper quantile has a lower mean
    return with_spread(_bisect(lambda sigma: with_spread(sigma).mean() > mean, 0.0, 4.0))


def _bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    """The value at which `below`, which is true up to it, turns false."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
