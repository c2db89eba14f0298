"""The record of an engine step, and the interface of policies that choose K."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_tlt.errors import TLTError

if TYPE_CHECKING:
    from verl_tlt.speculation.costs import LatencyTable

OFF = -1
"""The draft length of a step without any drafter: its own pass is skipped too, as in stock vLLM. K=0 still runs it."""


@dataclass(slots=True)
class Step:
    """One finished engine step: a policy learns from it, `StepSums` adds it up, the engine's trace has a line of it.

    What `EngineStats` sums has the same name there.
    """

    batch: int  # decode-phase requests in the step; a prefill that joins does not count
    kv_tokens: int  # tokens of context they held
    drafted: int  # K drafted in this step (verified by the next one); OFF when the drafter did not run
    verified: int  # K drafted by the step before, verified in this one; 0 when nothing was verified
    num_drafts: int = 0  # requests that had a draft verified in this step
    num_accepted_tokens_per_pos: Sequence[int] = ()
    """[i]: how many of those drafts had their first i+1 tokens accepted; length `verified`."""
    num_decode_tokens: int = 0  # tokens the step produced over all decode-phase requests
    latency_s: float = 0.0  # seconds since the step before finished; after a pause, since its own start
    clean: bool = False
    """False for steps whose time is no step cost: mixed with prefill, K just changed, after a pause, no drafts made."""
    num_draft_tokens: int = 0  # tokens in the drafts that were verified
    control_s: float = 0.0  # seconds that the step waited for verl-tlt
    unix_s: float = 0.0  # when it finished
    decode_only: bool = True
    """No prefill in the step and no pause before it, so that its time is that of decoding."""


class ControlError(TLTError, ValueError):
    """A policy's name, a draft length or a table is wrong; the message is one sentence that names it."""


class Policy(ABC):
    """Chooses K before drafting, and learns from finished steps. Deterministic given its inputs."""

    @abstractmethod
    def choose(self, batch: int) -> int:
        """Tokens to draft in the coming step of so many requests: one of the engine's draft lengths."""

    def observe(self, step: Step) -> None:  # noqa: B027
        """Learn from one finished step."""

    def set_acceptance(self, conditional: Sequence[float]) -> None:  # noqa: B027
        """Take a drafter's expected acceptance: P(position i accepted | all before accepted); empty: unknown."""

    def set_costs(self, costs: LatencyTable) -> None:  # noqa: B027
        """Take the calibration's step costs."""
