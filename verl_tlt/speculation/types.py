"""What the engine tells the controller, and what it asks of it: numbers only, no vLLM, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from verl_tlt.errors import TLTError

OFF = -1
"""The arm "no drafter at all": the drafter's own pass is skipped too, as in stock vLLM. K=0 still runs it."""


class Load(NamedTuple):
    """What the next engine step will carry, known before drafting."""

    batch: int
    """Requests in their decode phase (a prefill that joins does not count)."""
    kv_tokens: int
    """Tokens of context held by those requests."""


@dataclass(frozen=True)
class StepRecord:
    """One finished engine step."""

    batch: int
    """Decode-phase requests in the step."""
    kv_tokens: int
    """Tokens of context they held."""
    drafted: int
    """K drafted in this step (verified by the next one); OFF when the drafter did not run."""
    verified: int
    """K drafted by the step before, verified in this one; 0 when nothing was verified."""
    num_drafts: int
    """Requests that had a draft verified in this step."""
    num_accepted_tokens_per_pos: tuple[int, ...]
    """[i]: how many of those drafts had their first i+1 tokens accepted; length `verified`."""
    produced: int
    """Tokens the step produced over all decode-phase requests."""
    latency_s: float
    """Seconds since the step before finished."""
    clean: bool
    """False for steps that must not teach: mixed with prefill, K just changed, after a pause, drafting impossible."""


class ControlError(TLTError, ValueError):
    """A policy name, an arm, a threshold or a table is wrong; the message is one sentence that names it."""


class Policy(Protocol):
    """Chooses K before drafting; learns from finished steps. Deterministic given its inputs and seed."""

    def choose(self, load: Load) -> int:
        """Tokens to draft in the coming step: one of the arms."""
        ...

    def observe(self, step: StepRecord) -> None:
        """Learn from one finished step, clean or not."""
        ...
