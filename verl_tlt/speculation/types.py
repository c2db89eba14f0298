"""What the engine tells the controller, and what it asks of it: numbers only, no vLLM, no clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from verl_tlt.errors import TLTError

if TYPE_CHECKING:
    from verl_tlt.speculation.costs.latency import LatencyModel
    from verl_tlt.speculation.costs.tables import LatencyTable

OFF = -1
"""The draft length of a step without any drafter: its own pass is skipped too, as in stock vLLM. K=0 still runs it."""


class Load(NamedTuple):
    """What the next engine step will carry, known before drafting."""

    batch: int  # requests in their decode phase (a prefill that joins does not count)
    kv_tokens: int  # tokens of context held by those requests


@dataclass(slots=True)
class Step:
    """One finished engine step: a policy learns from it, `StepSums` adds it up, the engine's trace has a line of it.

    What `EngineStats` sums has the same name there.
    """

    batch: int  # decode-phase requests in the step
    kv_tokens: int  # tokens of context they held
    drafted: int  # K drafted in this step (verified by the next one); OFF when the drafter did not run
    verified: int  # K drafted by the step before, verified in this one; 0 when nothing was verified
    num_drafts: int = 0  # requests that had a draft verified in this step
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """[i]: how many of those drafts had their first i+1 tokens accepted; length `verified`."""
    num_decode_tokens: int = 0  # tokens the step produced over all decode-phase requests
    latency_s: float = 0.0  # seconds since the step before finished
    clean: bool = False
    """False for steps that must not teach: mixed with prefill, K just changed, after a pause, drafting impossible."""
    num_draft_tokens: int = 0  # tokens in the drafts that were verified
    num_generation_tokens: int = 0  # tokens handed to requests, first tokens after a prefill included
    control_s: float = 0.0  # seconds that the step waited for verl-tlt
    unix_s: float = 0.0  # when it finished
    decode_only: bool = True
    """No prefill in the step and no pause before it, so that its time is that of decoding."""
    accepted: Sequence[tuple[str, int]] = ()  # (request, draft tokens accepted) of each draft that counts
    ended: Sequence[tuple[str, int]] = ()
    """(request, its tokens) of those that ended with this step or since the one before."""


class ControlError(TLTError, ValueError):
    """A policy name, a draft length, a threshold or a table is wrong; the message is one sentence that names it."""


class Policy(ABC):
    """Chooses K before drafting, and learns from finished steps. Deterministic given its inputs and seed."""

    latency: LatencyModel | None = None  # what steps cost here, OFF included, where the policy learns it

    @abstractmethod
    def choose(self, load: Load) -> int:
        """Tokens to draft in the coming step of at least one request: one of the engine's draft lengths."""

    def observe(self, step: Step) -> None:  # noqa: B027
        """Learn from one finished step, clean or not."""

    def prepare(self, load: Load) -> None:  # noqa: B027
        """Compute now what `choose` will need for about this load; called while the engine waits for its model."""

    def set_acceptance(self, conditional: Sequence[float]) -> None:  # noqa: B027
        """Take a new drafter's expected acceptance: P(position i accepted | all before accepted)."""

    def set_latency(self, table: LatencyTable) -> None:  # noqa: B027
        """Take measured step costs: a calibration, or what an earlier run learned."""
