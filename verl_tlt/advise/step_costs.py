"""Seconds of an engine step in a simulation: computed from a data sheet, or as a run's own steps were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verl_tlt.errors import TLTError
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF


class CostModel(Protocol):
    """Noise-free seconds of one engine step."""

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """A step that verifies `verified`+1 tokens per request and drafts `drafted` more (OFF: no drafter)."""
        ...


@dataclass(frozen=True)
class RooflineCost:
    """Step costs of a decoder from known coefficients; the shape is that which `speculation.costs.roofline` fits.

    A step reads weights and KV cache or computes over the verified tokens, whichever takes longer; then it drafts.
    """

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
    active_share: float = 1.0
    """Share of the weights that one token uses: below 1 in a mixture of experts, whose tokens use different ones."""

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step."""
        return self.verify_s(batch, kv_tokens, 1 + max(verified, 0)) + self.draft_s(batch, drafted)

    def verify_s(self, batch: int, kv_tokens: int, tokens: int) -> float:
        """Seconds of the target's pass over `tokens` tokens per request."""
        return self.overhead_s + self.pass_over(batch * tokens, batch * tokens, kv_tokens)

    def pass_over(self, tokens: int, computed: int, kv_tokens: int) -> float:
        """Seconds of reading KV cache and the weights that `tokens` tokens use, and of computing `computed` tokens."""
        share = 1.0 if self.active_share >= 1.0 else 1.0 - (1.0 - self.active_share) ** tokens
        memory = self.weights_s * share + self.kv_token_s * kv_tokens
        return float((memory**self.sharpness + (self.token_s * computed) ** self.sharpness) ** (1.0 / self.sharpness))

    def draft_s(self, batch: int, drafted: int) -> float:
        """Seconds of the drafter's passes for `drafted` tokens per request."""
        if drafted == OFF:
            return 0.0
        further = self.pass_s * (drafted - 1) + self.first_s if drafted > 0 else 0.0
        return self.sync_s + further + self.request_pass_s * batch * max(drafted, 1)


class LearnedCost:
    """Step costs that a run measured, at whatever batches it used each draft length; `LatencyModel` fills the gaps.

    Args:
        table: steps whose draft length did not just change.

    Raises:
        TLTError: the table is empty.
    """

    def __init__(self, table: LatencyTable) -> None:
        if not table.points:
            raise TLTError("A run without steady engine steps does not say what a step costs.")
        self.longest = max(0, *table.arms())
        """Longest draft that was measured."""
        self._model = LatencyModel(range(self.longest + 1), table=table)

    def seconds(self, batch: int, kv_tokens: int, verified: int, drafted: int) -> float:
        """Seconds of one step, whatever it verifies; IndexError for a draft length beyond `longest`."""
        return self._model.predict(batch, kv_tokens)[drafted + 1]  # OFF, 0, 1, ...
