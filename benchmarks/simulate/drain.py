"""Simulates how an engine decodes a batch of responses to the end, at given step times.

A rollout is a series of segments in which an engine does the same in every step: each ends where the batch has changed
by `GRAIN` or the contexts have grown by `GROWTH`. In a segment the draft length is the one with the most tokens per
second, and in every step a request gains the accept length expected at its own acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    prefill_token_s: float = 0.0


def decode(spec: EngineSpec, lengths: Lengths, prompt: int, gains: Floats | None = None) -> float:
    """Seconds to decode all responses, as stock or with a drafter that runs all the time.

    `gains` are the tokens that each request gains in a step by draft length 0, 1, ..., [requests, K_max + 1].
    """
    seconds = lengths.size * prompt * spec.prefill_token_s
    left = lengths.astype(np.float64)  # tokens to go, [requests]
    queue = np.arange(lengths.size)  # requests that are not done, those that decode first
    while queue.size:
        rows = queue[: spec.max_batch]  # requests that decode, [batch]
        batch = rows.size
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
        seconds += steps * spec.step_seconds(middle, middle_kv, k)
        left[rows] -= gained
        queue = queue[left[queue] > 1e-9]
    return seconds
