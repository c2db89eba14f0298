"""Simulated rollouts of a whole run: every response is decoded twice, by stock verl and with TLT, at computed costs.

Repeatable by seed: each replica draws from a random generator of its own, so the result depends neither on the order in
which replicas are simulated nor on the process that does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from verl_tlt.advise.replica import Decoded, EngineSpec, Replica, decode_as_stock
from verl_tlt.advise.response_lengths import Lengths, LogNormal
from verl_tlt.errors import TLTError

SMALL_BATCH = 32
"""Requests in an engine below which a rollout counts as its tail (the TLT paper's threshold)."""


@dataclass(frozen=True)
class SimulatedRun:
    """What is simulated: `steps` rollouts on the same replicas, with a drafter that stays as it is."""

    engine: EngineSpec
    replicas: int
    requests: int
    """Responses of a rollout."""
    lengths: LogNormal
    acceptance: tuple[float, ...]
    """Conditional acceptance of the drafter by draft position."""
    prompt: int = 512
    """Tokens of a prompt."""
    steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.replicas, self.steps) < 1 or self.requests < self.replicas:
            raise TLTError(
                "A simulation needs a replica, a rollout, and a request for every replica, not "
                f"{self.replicas} replicas, {self.steps} rollouts and {self.requests} requests."
            )


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


Histories = Iterable[list[tuple[Decoded, Decoded]]]


def simulate(run: SimulatedRun, apply: Callable[..., Histories] = map) -> SimulatedRollout:
    """Simulate a run.

    Args:
        run: what to simulate.
        apply: how a function is applied to every replica, as `map` does; a process pool's `map` spreads the replicas.
    """
    drawn = [run.lengths.draw(np.random.default_rng([run.seed, i + 1]), run.requests) for i in range(run.steps)]
    # dealt out as evenly as verl's load balancer does
    shares = [[lengths[i :: run.replicas] for lengths in drawn] for i in range(run.replicas)]
    histories = list(apply(partial(_history, run), range(run.replicas), shares))
    steps = [_of_step(rollouts) for rollouts in zip(*histories, strict=True)]
    tokens = float(np.mean([lengths.sum() for lengths in drawn]))
    return SimulatedRollout(tokens, *(float(mean) for mean in np.mean(steps, axis=0)))


def _history(run: SimulatedRun, index: int, shares: Sequence[Lengths]) -> list[tuple[Decoded, Decoded]]:
    """(stock, with TLT) of every rollout of one replica, which remembers from one to the next what it has learned."""
    seed = int(np.random.SeedSequence([run.seed, index]).generate_state(1)[0])
    replica, acceptance = Replica(run.engine, seed), np.asarray(run.acceptance)
    return [
        (decode_as_stock(run.engine, lengths, run.prompt), replica.rollout(lengths, run.prompt, acceptance, acceptance))
        for lengths in shares
    ]


def _of_step(replicas: Sequence[tuple[Decoded, Decoded]]) -> tuple[float, float, float, float]:
    """(stock's seconds, seconds with TLT, tail share, bubble share) of one rollout."""
    stock = [plain for plain, _ in replicas]
    stock_s = max(s.seconds for s in stock)
    decoding = sum(sum(s.seconds_by_batch.values()) for s in stock)
    tail = sum(seconds for s in stock for batch, seconds in s.seconds_by_batch.items() if batch < SMALL_BATCH)
    bubble = 1.0 - sum(s.seconds for s in stock) / (stock_s * len(stock))
    return stock_s, max(ours.seconds for _, ours in replicas), tail / decoding if decoding else 0.0, bubble
