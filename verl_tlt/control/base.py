"""What every policy answers to, so that an engine need not know which one it drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_tlt.control.costs import LatencyTable
from verl_tlt.control.types import OFF, Load, StepRecord


class BasePolicy:
    """A `Policy` whose optional hooks do nothing unless it has a use for them.

    While the engine runs without its drafter (a step recorded with `drafted == OFF`), every policy chooses 0.
    """

    def __init__(self) -> None:
        self.drafter_off = False

    def choose(self, load: Load) -> int:
        """Tokens to draft in the coming step: one of the arms; O(arms)."""
        return 0 if self.drafter_off or load.batch <= 0 else self.decide(load)

    def observe(self, step: StepRecord) -> None:
        """Learn from one finished step, clean or not."""
        self.drafter_off = step.drafted == OFF
        self.learn(step)

    def decide(self, load: Load) -> int:
        """`choose` with a running drafter and at least one request."""
        raise NotImplementedError

    def learn(self, step: StepRecord) -> None:
        """`observe`, for policies that learn."""

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        """Take note of a new drafter's expected acceptance: P(position i accepted | all before accepted)."""

    def set_latency(self, table: LatencyTable) -> None:
        """Take note of measured latencies: a calibration, or what an earlier run learned."""

    def summary(self) -> dict[str, Any]:
        """What was learned and done so far, JSON-able."""
        raise NotImplementedError
