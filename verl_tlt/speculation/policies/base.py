"""What every policy answers to, so that an engine need not know which one it drives; and those that learn nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs.latency import LatencyModel
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF, Load, StepRecord


class BasePolicy(ABC):
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

    @abstractmethod
    def decide(self, load: Load) -> int:
        """`choose` with a running drafter and at least one request."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """What was learned and done so far, JSON-able."""

    def learn(self, step: StepRecord) -> None:  # noqa: B027
        """`observe`, for policies that learn."""

    def prepare(self, load: Load) -> None:  # noqa: B027
        """Do now what `choose` will need for about this load; called while the engine waits for its model."""

    def set_acceptance(self, conditional: Sequence[float]) -> None:  # noqa: B027
        """Take note of a new drafter's expected acceptance: P(position i accepted | all before accepted)."""

    def set_latency(self, table: LatencyTable) -> None:  # noqa: B027
        """Take note of measured latencies: a calibration, or what an earlier run learned."""


class FixedPolicy(BasePolicy):
    """Always the same K (0: the policy `off`)."""

    def __init__(self, draft_length: int) -> None:
        super().__init__()
        self._draft_length = draft_length

    def decide(self, load: Load) -> int:
        """The K it was built with."""
        return self._draft_length

    def summary(self) -> dict[str, Any]:
        """The K in use."""
        return {"policy": "fixed" if self._draft_length else "off", "draft_length": self._draft_length}


class TablePolicy(BasePolicy):
    """argmax τ(K) / T(batch, kv, K) over a measured latency table and a given acceptance; learns nothing online.

    Until both are given it drafts nothing. Draft lengths the table does not hold are not used.
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
        cost = self._latency.predict(load.batch, load.kv_tokens)[1:]
        best, goodput = 0, 0.0
        for k, seconds in zip(self._usable, cost, strict=True):
            if self._tau[k] > goodput * seconds:
                best, goodput = k, self._tau[k] / seconds
        return best

    def set_acceptance(self, conditional: Sequence[float]) -> None:
        """Acceptance per position, for example the drafter's held-out score."""
        self._tau = expected_accept_lengths(conditional, self._arms[-1])

    def set_latency(self, table: LatencyTable) -> None:
        """Replace the latency table."""
        measured = set(table.arms())
        self._usable = tuple(k for k in self._arms if k in measured)
        self._latency = LatencyModel(self._usable, table=table) if 0 in self._usable else None

    def summary(self) -> dict[str, Any]:
        """Which draft lengths the table covers."""
        return {"policy": "table", "draft_lengths": list(self._usable), "accept_lengths": self._tau}
