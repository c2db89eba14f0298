"""What a policy is compared with: the best that hindsight or perfect knowledge allows."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.simulate.engine import SimulatedEngine, Truth
from verl_tlt.speculation.policies import FixedPolicy
from verl_tlt.speculation.types import Policy


class TrueSpeed(Policy):
    """The oracle: sees true acceptance and true costs before every step."""

    def __init__(self, arms: Sequence[int]) -> None:
        self._arms = tuple(arms)
        self._truth: Truth | None = None

    def see(self, truth: Truth) -> None:
        self._truth = truth

    def choose(self, batch: int) -> int:
        """The argmax of true τ(K) over true T(batch, kv, K)."""
        assert self._truth is not None, "the simulator shows it before each choice"
        tau: npt.NDArray[np.float64] = self._truth.accept_lengths
        cost, kv_tokens = self._truth.cost, self._truth.kv_tokens
        return max(self._arms, key=lambda k: tau[k] / cost.seconds(batch, kv_tokens, k, k))


def fixed_runs(engine: SimulatedEngine, arms: Sequence[int]) -> dict[str, float]:
    """Seconds with each fixed K, by its name in the results; the fastest is the best single K."""
    return {f"fixed-{k}" if k else "off": engine.run(FixedPolicy(k)) for k in arms}
