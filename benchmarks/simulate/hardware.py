"""What an engine step costs on simulated hardware: rooflines of real machines, or a recorded latency table.

Seconds of a step = reading weights and KV, or computing over the verified tokens, whichever dominates, plus the
drafter's passes, plus a fixed overhead. The 32B model is calibrated to Table 4 of the TLT paper (arXiv 2511.16665).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF


class CostModel(Protocol):
    """Noise-free seconds of one engine step."""

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """A step that verifies `verified`+1 tokens per request and drafts `drafted` more (OFF: no drafter)."""
        ...


@dataclass(frozen=True)
class RooflineCost:
    """A decoder on an accelerator: smooth maximum of memory time and compute time."""

    weights_s: float
    """Reading all weights once."""
    kv_token_s: float
    """Reading one token of KV cache."""
    token_s: float
    """Computing one token."""
    sharpness: float
    """Exponent of the smooth maximum: 1 adds memory and compute time, large takes the larger."""
    overhead_s: float
    """Scheduling, launches and sampling per step."""
    sync_s: float
    """The drafter's pass that keeps its KV in step: paid at K=0, not at OFF."""
    first_s: float
    """What turns that pass into the first draft token (the LM head)."""
    pass_s: float
    """Each further draft token."""
    request_pass_s: float
    """Per request and draft token."""
    extra_s: Mapping[int, float] = field(default_factory=dict)
    """Penalty by verified K, for draft lengths without full CUDA graphs."""
    capture: tuple[int, ...] = ()
    """Token counts with a CUDA graph, ascending: a step is padded up to the next; beyond the last none applies."""
    eager_s: float = 0.0
    """Penalty of a step beyond the last graph."""

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step."""
        return self.verify_s(batch, kv_tokens, verified + 1 if verified > 0 else 1) + (
            self.draft_s(batch, drafted) + self.extra_s.get(verified, 0.0)
        )

    def verify_s(self, batch: int, kv_tokens: int, tokens: int) -> float:
        """The target's pass over `tokens` tokens per request."""
        memory = self.weights_s + self.kv_token_s * kv_tokens
        count, eager_s = batch * tokens, 0.0
        if self.capture and count <= self.capture[-1]:
            count = self.capture[bisect_left(self.capture, count)]
        elif self.capture:
            eager_s = self.eager_s
        compute = self.token_s * count
        return (
            self.overhead_s
            + eager_s
            + float((memory**self.sharpness + compute**self.sharpness) ** (1.0 / self.sharpness))
        )

    def draft_s(self, batch: int, drafted: int) -> float:
        """The drafter's passes for `drafted` tokens per request."""
        if drafted == OFF:
            return 0.0
        further = self.pass_s * (drafted - 1) + self.first_s if drafted > 0 else 0.0
        return self.sync_s + further + self.request_pass_s * batch * max(drafted, 1)


@dataclass(frozen=True)
class SwitchCost:
    """Another cost model plus a price for every change of K: shape changes and graph misses (vLLM issue 49548)."""

    inner: CostModel
    switch_s: float

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step."""
        change = self.switch_s if verified != max(drafted, 0) else 0.0
        return self.inner.seconds(batch, kv_tokens, verified, drafted) + change


class TableCost:
    """A recorded latency table, interpolated linearly over batch; KV tokens follow the nearest recorded batch.

    A step that changes K costs the mean of both draft lengths' steady steps: recordings hold only steady steps.
    """

    def __init__(self, table: LatencyTable) -> None:
        self._curves: dict[int, tuple[list[float], list[float]]] = {}
        for k in table.arms():
            by_batch: dict[int, list[float]] = {}
            for p in table.points:
                if p.draft_length == k:
                    by_batch.setdefault(p.batch, []).append(p.seconds)
            batches = sorted(by_batch)
            self._curves[k] = [float(b) for b in batches], [float(np.median(by_batch[b])) for b in batches]
        if 0 in self._curves:  # a recording that never ran without its drafter takes K=0 for stock
            self._curves.setdefault(OFF, self._curves[0])

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step; KeyError for a draft length that was not recorded."""
        if verified == max(drafted, 0):
            return self._steady(batch, drafted)
        return 0.5 * (self._steady(batch, verified) + self._steady(batch, drafted))

    def _steady(self, batch: int, draft_length: int) -> float:
        batches, seconds = self._curves[draft_length]
        return float(np.interp(batch, batches, seconds))


QWEN3_8B_H100 = RooflineCost(
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

VLLM_CAPTURE = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""CUDA-graph sizes vLLM captures by default."""

QWEN_32B_TP4 = RooflineCost(
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
