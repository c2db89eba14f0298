"""What every policy can be asked and told, and the policies that learn nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs.latency import LatencyModel
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


class FixedPolicy(BasePolicy):
    """Always the same K (0: the policy `off`)."""

    def __init__(self, draft_length: int) -> None:
        super().__init__()
        self._draft_length = draft_length

    def decide(self, load: Load) -> int:
        """The K it was built with."""
        return self._draft_length


class TablePolicy(BasePolicy):
    """argmax τ(K) / T(batch, kv, K) over a measured table and a given acceptance; learns nothing from steps.

    Until both are given it drafts nothing. Draft lengths that the table does not hold are not used.
    """

    def __init__(self, arms: Sequence[int]) -> None:
        super().__init__()
        self._arms = tuple(arms)
        self._usable: tuple[int, ...] = (0,)
        self._latency: LatencyModel | None = None
        self._tau: list[float] | None = None

    def decide(self, load: Load) -> int:
        """The best K by the table."""
        if self._latency is None or self._tau is None:
            return 0
        tau, seconds = self._tau, self._latency.predict(load.batch, load.kv_tokens)[1:]
        return max(zip(self._usable, seconds, strict=True), key=lambda arm: tau[arm[0]] / arm[1])[0]

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        """Acceptance per position, for example the drafter's held-out score."""
        self._tau = expected_accept_lengths(conditional, self._arms[-1])

    def set_latency(self, table: LatencyTable) -> None:
        """Replace the latency table."""
        measured = set(table.arms())
        self._usable = tuple(k for k in self._arms if k in measured)
        self._latency = LatencyModel(self._usable, table=table) if 0 in self._usable else None
