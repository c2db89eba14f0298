"""Seconds saved against stock: an engine with no drafter at all, serving the same tokens.

Our own K=0 is not stock, since the drafter still runs one pass; so the comparison takes the latency of the arm OFF,
measured at start or by calibration.
"""

from __future__ import annotations

from collections.abc import Callable

from verl_tlt.control.types import StepRecord


def stock_seconds(produced: int, batch: int, kv_tokens: int, off_latency: Callable[[int, int], float]) -> float:
    """Seconds a stock engine would have needed for the tokens of one step.

    Args:
        produced: tokens the step produced over all decode-phase requests.
        batch: those requests; stock produces one token per request and step.
        kv_tokens: their context.
        off_latency: (batch, kv_tokens) -> seconds of one stock step.
    """
    return produced / batch * off_latency(batch, kv_tokens) if batch > 0 else 0.0


class SavedTime:
    """Adds up seconds spent and seconds stock would have spent, over clean and unclean steps alike.

    A step mixed with prefill is left out of both sums: its latency is not decoding's.
    """

    def __init__(self, off_latency: Callable[[int, int], float]) -> None:
        self._off_latency = off_latency
        self.engine_s = 0.0
        self.stock_s = 0.0

    def add(self, step: StepRecord, mixed: bool = False) -> None:
        """Account for one finished step.

        Args:
            step: the record.
            mixed: the step also carried a prefill.
        """
        if mixed or step.batch <= 0:
            return
        self.engine_s += step.latency_s
        self.stock_s += stock_seconds(step.produced, step.batch, step.kv_tokens, self._off_latency)

    @property
    def saved_s(self) -> float:
        """Seconds saved; negative when speculation cost time."""
        return self.stock_s - self.engine_s
