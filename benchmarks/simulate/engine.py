"""A simulated engine: drives a policy through rollouts that drain from many requests to one.

It keeps what makes control hard on a real engine: K is chosen before drafting and verified one step later, so a
step that changes K pays for the old draft and the new one and teaches no latency; the policy sees latencies with
noise and stalls; requests that wait join as places free up and make a step unclean. Time is accounted without the
noise, which hits every policy alike.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.simulate.hardware import CostModel
from benchmarks.simulate.workload import Rollout, Workload
from verl_tlt.speculation.types import Policy, Step


@dataclass(frozen=True)
class Noise:
    """How measured latencies differ from true ones."""

    sigma: float = 0.03
    """Log-normal jitter."""
    stall_chance: float = 0.0
    """Share of steps that stall."""
    stall_factor: float = 4.0
    """How much longer a stalled step takes."""
    swing: float = 0.0
    """Slow machine-wide drift: +-this share over `swing_s`; real, so it is charged to the makespan."""
    swing_s: float = 30.0

    def pace(self, seconds: float) -> float:
        """The machine's true slowness so many seconds after the start, whatever was done in them."""
        return 1.0 + self.swing * float(np.sin(2.0 * np.pi * seconds / self.swing_s))


@dataclass(frozen=True)
class Truth:
    """What no real policy can know: a policy that has a method `see` is shown it before each choice."""

    accept_lengths: npt.NDArray[np.float64]
    """τ(0), τ(1), ... of the requests at hand."""
    cost: CostModel
    kv_tokens: int
    """Tokens of context that the requests hold."""


@dataclass(frozen=True)
class SimulatedEngine:
    workload: Workload
    cost: CostModel
    noise: Noise
    observe_lag: int
    """Steps after which the policy learns of a step, besides its own (1: async scheduling)."""

    def run(self, policy: Policy) -> float:
        """Seconds that all rollouts take with `policy`, which keeps what it learned from one to the next."""
        seconds = 0.0
        rng = np.random.default_rng([self.workload.seed, 99])
        for index in range(self.workload.rollouts):
            seconds = _Drain(self, self.workload.rollout(index), rng, seconds).to_the_end(policy)
        return seconds


class _Drain:
    """One rollout, which begins so many seconds after the first one."""

    def __init__(self, engine: SimulatedEngine, rollout: Rollout, rng: np.random.Generator, seconds: float) -> None:
        self.engine, self.rollout, self.rng, self.seconds = engine, rollout, rng, seconds
        self.done = np.zeros(rollout.lengths.size, dtype=np.int64)  # tokens produced, [requests]
        self.rows = np.arange(min(engine.workload.max_batch, rollout.lengths.size))  # decoding, [batch]
        self.next_row = self.rows.size
        self.drafted = 0
        self.late: deque[Step] = deque()

    def to_the_end(self, policy: Policy) -> float:
        """Seconds from the start of the first rollout to the end of this one."""
        prefill = True
        while self.rows.size:
            kv_tokens = int(self.done[self.rows].sum()) + self.rows.size * self.engine.workload.prompt
            scales = self.rollout.scales(self.rows, self.done[self.rows])
            if (see := getattr(policy, "see", None)) is not None:
                tau = self.rollout.accept_lengths(scales, self.rollout.acceptance.size)
                see(Truth(tau, self.engine.cost, kv_tokens))
            k = policy.choose(self.rows.size)
            self.late.append(self._step(k, kv_tokens, scales, prefill))
            prefill = self._admit()
            if len(self.late) > self.engine.observe_lag:
                policy.observe(self.late.popleft())
        while self.late:
            policy.observe(self.late.popleft())
        return self.seconds

    def _step(self, k: int, kv_tokens: int, scales: npt.NDArray[np.float64], prefill: bool) -> Step:
        verified, batch = self.drafted, self.rows.size
        done = self.done[self.rows]
        if verified > 0:
            kept = self.rollout.verify(self.rows, done, scales, verified)  # [batch, verified]
            accepted = tuple(int(n) for n in kept.sum(axis=0))
            gain = kept.sum(axis=1) + 1  # [batch]
        else:
            accepted, gain = (), np.ones(batch, dtype=np.int64)
        left = self.rollout.lengths[self.rows] - done
        gain = np.minimum(gain, left)
        produced = int(gain.sum())
        seconds = self.engine.noise.pace(self.seconds) * self.engine.cost.seconds(batch, kv_tokens, verified, k)
        self.seconds += seconds
        self.done[self.rows] = done + gain
        self.rows = self.rows[gain < left]
        self.drafted = max(k, 0)
        return Step(
            batch=batch,
            kv_tokens=kv_tokens,
            drafted=k,
            verified=verified,
            num_drafts=batch if verified > 0 else 0,
            num_accepted_tokens_per_pos=accepted,
            num_decode_tokens=produced,
            latency_s=seconds * self._jitter(),
            clean=verified == max(k, 0) and not prefill,
        )

    def _admit(self) -> bool:
        """Fill free places from the queue; True when somebody joined, whose prefill makes the next step unclean."""
        free = self.engine.workload.max_batch - self.rows.size
        joining = min(free, self.rollout.lengths.size - self.next_row)
        if joining > 0:
            self.rows = np.concatenate((self.rows, np.arange(self.next_row, self.next_row + joining)))
            self.next_row += joining
        return joining > 0

    def _jitter(self) -> float:
        noise = self.engine.noise
        factor = float(self.rng.lognormal(0.0, noise.sigma)) if noise.sigma else 1.0
        if noise.stall_chance and self.rng.random() < noise.stall_chance:
            factor *= noise.stall_factor
        return factor
