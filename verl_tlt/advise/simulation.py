"""Simulated rollouts of a whole run: every response is decoded by stock verl and with TLT, at computed step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_tlt.advise.decoding import Decoded, EngineSpec, rollout
from verl_tlt.advise.response_lengths import LogNormal

SMALL_BATCH = 32
"""Requests in an engine below which a rollout counts as its tail (the TLT paper's threshold)."""


@dataclass(frozen=True)
class SimulatedRun:
    """What is simulated: `steps` rollouts on the same replicas, with a drafter that stays as it is."""

    engine: EngineSpec
    replicas: int
    requests: int
    """Responses of a rollout; one for each replica at least."""
    lengths: LogNormal
    acceptance: tuple[float, ...]
    """Conditional acceptance of the drafter by draft position."""
    prompt: int = 512
    """Tokens of a prompt."""
    steps: int = 1
    seed: int = 0


@dataclass(frozen=True)
class SimulatedRollout:
    """Means over the rollouts of a simulated run; seconds."""

    tokens: float
    stock_s: float
    """Stock's rollout: until the last replica is done."""
    rollout_s: float
    """The same with TLT."""
    tail_share: float
    """Share of stock's decoding time at batches below `SMALL_BATCH`."""
    bubble_share: float
    """Share of all replicas' time in stock's rollout in which they have nothing to decode."""

    @property
    def speed(self) -> float:
        """How many times as fast the rollout is as stock's."""
        return self.stock_s / self.rollout_s


def simulate(run: SimulatedRun) -> SimulatedRollout:
    """Simulate a run; the same seed gives the same result."""
    rollouts = []
    for step in range(1, run.steps + 1):
        rng = np.random.default_rng([run.seed, step])
        lengths = run.lengths.draw(rng, run.requests)
        shares = [lengths[i :: run.replicas] for i in range(run.replicas)]  # as even as verl's balancer deals them out
        pairs = [rollout(run.engine, share, run.prompt, run.acceptance, rng) for share in shares]
        rollouts.append((float(lengths.sum()), *_summary([stock for stock, _ in pairs], [tlt for _, tlt in pairs])))
    return SimulatedRollout(*(float(mean) for mean in np.mean(rollouts, axis=0)))


def _summary(stock: Sequence[Decoded], tlt: Sequence[Decoded]) -> tuple[float, float, float, float]:
    """(stock's seconds, seconds with TLT, tail share, bubble share) of one rollout on all replicas."""
    stock_s = max(s.seconds for s in stock)
    decoding = sum(sum(s.seconds_by_batch.values()) for s in stock)
    tail = sum(seconds for s in stock for batch, seconds in s.seconds_by_batch.items() if batch < SMALL_BATCH)
    bubble = 1.0 - sum(s.seconds for s in stock) / (stock_s * len(stock))
    return stock_s, max(t.seconds for t in tlt), tail / decoding if decoding else 0.0, bubble
