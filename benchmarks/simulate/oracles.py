"""What a policy is compared with: the best that hindsight or perfect knowledge allows.

O1: the best single K. O2: the best K per octave of batch size, which is what a bucketed bandit can at best reach.
O3: the argmax of true τ(K) over true T(batch, kv, K) at every step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.simulate.engine import SimulatedEngine, SimulationResult, Truth
from verl_tlt.speculation.policies import FixedPolicy
from verl_tlt.speculation.types import Policy


class TrueSpeed(Policy):
    """O3: sees true acceptance and true costs before every step."""

    def __init__(self, arms: Sequence[int]) -> None:
        self._arms = tuple(arms)
        self._truth: Truth | None = None

    def see(self, truth: Truth) -> None:
        self._truth = truth

    def choose(self, batch: int) -> int:
        """The argmax."""
        assert self._truth is not None, "the simulator shows it before each choice"
        tau: npt.NDArray[np.float64] = self._truth.accept_lengths
        cost, kv_tokens = self._truth.cost, self._truth.kv_tokens
        return max(self._arms, key=lambda k: tau[k] / cost.seconds(batch, kv_tokens, k, k))


class PerBucket(Policy):
    """O2: one K per octave of batch size."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self._lengths = dict(lengths)

    def choose(self, batch: int) -> int:
        """K of the octave; the nearest known octave where it was never measured."""
        octave = batch.bit_length() - 1
        return self._lengths[min(self._lengths, key=lambda known: abs(known - octave))]


def static_runs(engine: SimulatedEngine, arms: Sequence[int]) -> dict[int, SimulationResult]:
    """One run per fixed K; the fastest is O1."""
    return {k: engine.run(FixedPolicy(k)) for k in arms}


def best_per_bucket(runs: Mapping[int, SimulationResult]) -> PerBucket:
    """O2 from the fixed runs: in every octave, the K that saved most against K=0 there."""
    octaves = {octave for run in runs.values() for octave in run.buckets}

    def speed(k: int, octave: int) -> float:
        bucket = runs[k].buckets.get(octave)
        return bucket.off_seconds / bucket.seconds if bucket else 0.0

    return PerBucket({octave: max(runs, key=lambda k: speed(k, octave)) for octave in octaves})
