"""Simulates how an engine decodes a batch of responses to the end, at given step times.

A rollout is a series of segments in which an engine does the same in every step: each ends where the batch has changed
by `GRAIN` or the contexts have grown by `GROWTH`. In a segment the draft length is the one with the most tokens per
second, and in every step a request gains the accept length expected at its own acceptance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from verl_tlt.speculation.types import OFF

GRAIN = 1.0 / 32.0
"""Relative change of the batch at which a segment ends: the policy treats less as the same load."""
GROWTH = 0.25
"""Relative growth of the mean context at which a segment ends."""

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
