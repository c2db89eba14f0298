"""An engine that never drains: batch, context and acceptance stay what they are set to until they are set anew.

Where `simulate.engine` asks how fast a whole rollout is, this asks how a policy behaves at one load: which K it settles
on, how often it changes it, what it does when acceptance or batch jump.
"""

from __future__ import annotations

import numpy as np

from benchmarks.simulate.hardware import CostModel
from verl_tlt.speculation.types import Load, Policy, StepRecord


class SteadyEngine:
    """Drives a policy step by step at a load the caller may change between steps.

    Args:
        policy: what chooses K.
        cost: what a step takes.
        acceptance: conditional acceptance of the first draft position; it shrinks by 3 % per position.
        batch: requests.
        context: tokens of context per request.
        sigma: log-normal jitter of measured latencies.
        seed: of acceptance and jitter.
    """

    def __init__(
        self,
        policy: Policy,
        cost: CostModel,
        *,
        acceptance: float = 0.7,
        batch: int = 8,
        context: int = 1000,
        sigma: float = 0.03,
        seed: int = 0,
    ) -> None:
        self.policy, self.cost = policy, cost
        self.acceptance, self.batch, self.context, self.sigma = acceptance, batch, context, sigma
        self.lengths: list[int] = []
        """K of every step so far."""
        self.seconds = 0.0
        """True seconds so far."""
        self._rng = np.random.default_rng(seed)
        self._before = 0

    def run(self, steps: int) -> SteadyEngine:
        """Advance by `steps`; returns itself."""
        for _ in range(steps):
            load = Load(self.batch, self.batch * self.context)
            k = self.policy.choose(load)
            accepted = self._verify()
            seconds = self.cost.seconds(load.batch, load.kv_tokens, self._before, k)
            self.policy.observe(
                StepRecord(
                    batch=load.batch,
                    kv_tokens=load.kv_tokens,
                    drafted=k,
                    verified=self._before,
                    num_drafts=load.batch if self._before else 0,
                    num_accepted_tokens_per_pos=accepted,
                    produced=load.batch + sum(accepted),
                    latency_s=seconds * float(self._rng.lognormal(0.0, self.sigma)),
                    clean=k == self._before,
                )
            )
            self.seconds += seconds
            self.lengths.append(k)
            self._before = k
        return self

    def changes(self) -> int:
        """How often K changed so far."""
        return int(np.count_nonzero(np.diff(self.lengths)))

    def usual(self, last: int = 300) -> int:
        """The most frequent K of the latest steps."""
        values, counts = np.unique(self.lengths[-last:], return_counts=True)
        return int(values[counts.argmax()])

    def _verify(self) -> tuple[int, ...]:
        left, accepted = self.batch, []
        for position in range(self._before):
            left = int(self._rng.binomial(left, self.acceptance * 0.97**position))
            accepted.append(left)
        return tuple(accepted)
