"""What every policy of this package is built on: a `Policy` whose optional methods do nothing by default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF, Load, StepRecord


class BasePolicy(ABC):
    """A `Policy` whose optional methods do nothing by default.

    While the engine runs without its drafter (a step recorded with `drafted == OFF`), every policy chooses 0.
    """

    def __init__(self) -> None:
        self.drafter_off = False

    def choose(self, load: Load) -> int:
        """Tokens to draft in the coming step: one of the arms."""
        return 0 if self.drafter_off or load.batch <= 0 else self.decide(load)

    def observe(self, step: StepRecord) -> None:
        """Learn from one finished step, clean or not."""
        self.drafter_off = step.drafted == OFF
        self.learn(step)

    @abstractmethod
    def decide(self, load: Load) -> int:
        """`choose` with a running drafter and at least one request."""

    def learn(self, step: StepRecord) -> None:  # noqa: B027
        """`observe`, for policies that learn."""

    def prepare(self, load: Load) -> None:  # noqa: B027
        """Compute now what `choose` will need for about this load; called while the engine waits for its model."""

    def set_acceptance(self, conditional: Sequence[float]) -> None:  # noqa: B027
        """Take a new drafter's expected acceptance: P(position i accepted | all before accepted)."""

    def set_latency(self, table: LatencyTable) -> None:  # noqa: B027
        """Take measured step costs: a calibration, or what an earlier run learned."""
