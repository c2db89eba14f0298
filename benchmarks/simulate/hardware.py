"""Step costs of simulated hardware: a roofline with CUDA graphs, measured tables, a price of changing K."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.types import OFF

VLLM_CAPTURE = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""CUDA-graph sizes vLLM captures by default."""


class CostModel(Protocol):
    """Noise-free seconds of one engine step."""

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """A step that verifies `verified`+1 tokens per request and drafts `drafted` more (OFF: no drafter)."""
        ...


@dataclass(frozen=True)
class GraphCost:
    """A roofline for steps that may change K, with CUDA graphs: memory or compute, whichever takes longer."""

    weights_s: float
    """Reading all weights once."""
    kv_token_s: float
    """Reading one token of KV cache."""
    token_s: float
    """Computing one token."""
    sharpness: float
    """Exponent of the smooth maximum: 1 adds memory and compute time, a large one takes the larger."""
    overhead_s: float
    """Scheduling, launches and sampling of a step."""
    sync_s: float
    """The drafter's pass that keeps its KV cache in step with the policy's: paid at K=0, not at OFF."""
    first_s: float
    """The LM head, which turns that pass into the first draft token."""
    pass_s: float
    """Each further draft token."""
    request_pass_s: float
    """Each request's part of a drafter's pass."""
    extra_s: Mapping[int, float] = field(default_factory=dict)
    """Penalty by verified K, for draft lengths without full CUDA graphs."""
    capture: tuple[int, ...] = ()
    """Token counts with a CUDA graph, ascending: a step is padded up to the next; beyond the last none applies."""
    eager_s: float = 0.0
    """Penalty of a step beyond the last graph."""

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        verifying = self.verify_s(batch, kv_tokens, 1 + max(verified, 0))
        return verifying + self.draft_s(batch, drafted) + self.extra_s.get(verified, 0.0)

    def verify_s(self, batch: int, kv_tokens: int, tokens: int) -> float:
        count, eager_s = batch * tokens, 0.0
        padded = count
        if self.capture and count <= self.capture[-1]:
            padded = self.capture[bisect_left(self.capture, count)]
        elif self.capture:
            eager_s = self.eager_s
        memory = self.weights_s + self.kv_token_s * kv_tokens
        roof = (memory**self.sharpness + (self.token_s * padded) ** self.sharpness) ** (1.0 / self.sharpness)
        return float(self.overhead_s + eager_s + roof)

    def draft_s(self, batch: int, drafted: int) -> float:
        if drafted == OFF:
            return 0.0
        further = self.pass_s * (drafted - 1) + self.first_s if drafted > 0 else 0.0
        return self.sync_s + further + self.request_pass_s * batch * max(drafted, 1)


class TableCost:
    """Measured step costs, linear in the batch; context costs nothing beyond what it cost when they were measured.

    A step that changes K costs the mean of both draft lengths' steady steps: tables hold only steady steps.
    """

    def __init__(self, table: LatencyTable) -> None:
        self._table = table

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        steady = float(self._table.seconds(drafted, batch))
        if verified == max(drafted, 0):
            return steady
        return 0.5 * (steady + float(self._table.seconds(verified, batch)))


@dataclass(frozen=True)
class SwitchCost:
    """Another cost model plus a price for every change of K: shape changes and graph misses (vLLM issue 49548)."""

    inner: CostModel
    switch_s: float

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        change = self.switch_s if verified != max(drafted, 0) else 0.0
        return self.inner.seconds(batch, kv_tokens, verified, drafted) + change


QWEN3_8B_H100 = GraphCost(
    weights_s=16e9 / 3.0e12,
    kv_token_s=147e3 / 3.0e12,
    token_s=2 * 8e9 / 4.0e14,
    sharpness=4.0,
    overhead_s=0.6e-3,
    sync_s=0.25e-3,
    first_s=0.20e-3,
    pass_s=0.45e-3,
    request_pass_s=0.6e-6,
)
"""8B in bf16 on one H100: 3.0 TB/s and 400 TFLOP/s achieved, 147 KB of KV per token."""

QWEN_32B_TP4 = GraphCost(
    weights_s=5.5e-3,
    kv_token_s=65.5e3 / 3.0e12,
    token_s=0.0233e-3,
    sharpness=1.065,
    overhead_s=0.3e-3,
    sync_s=0.35e-3,
    first_s=0.28e-3,
    pass_s=0.63e-3,
    request_pass_s=0.0365e-3 / 8,
)
"""32B on four H100: weights and KV from its shapes, the rest fitted to the paper's Table 4 (3 % rms, 6 % at most)."""
