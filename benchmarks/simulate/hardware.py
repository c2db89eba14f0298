"""What an engine step costs on simulated hardware: the product's cost models, and a price for changing K on top."""

from __future__ import annotations

from dataclasses import dataclass

from verl_tlt.simulate.costs import QWEN3_8B_H100 as QWEN3_8B_H100
from verl_tlt.simulate.costs import QWEN_32B_TP4 as QWEN_32B_TP4
from verl_tlt.simulate.costs import CostModel as CostModel
from verl_tlt.simulate.costs import RooflineCost as RooflineCost
from verl_tlt.simulate.costs import TableCost as TableCost

VLLM_CAPTURE = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""CUDA-graph sizes vLLM captures by default."""


@dataclass(frozen=True)
class SwitchCost:
    """Another cost model plus a price for every change of K: shape changes and graph misses (vLLM issue 49548)."""

    inner: CostModel
    switch_s: float

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step."""
        change = self.switch_s if verified != max(drafted, 0) else 0.0
        return self.inner.seconds(batch, kv_tokens, verified, drafted) + change
