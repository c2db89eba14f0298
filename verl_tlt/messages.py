"""Every record that crosses a process border, as dataclasses.

Ray pickles them as they are. Where vLLM's RPC or JSON needs a dict, the sender makes it at that border and the receiver
turns it back (`to_dict`, `from_dict`), so that no other code sees one. Arrays are numpy: every process has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

STORE_NAME = "verl_tlt_drafter_store"
"""Name of the Ray actor that a starting server asks for the drafter (`trainer.drafter_store`)."""

NGRAM_MARK = "tlt_ngram"
"""Attribute of vLLM's `SchedulerOutput`: ids of the requests whose draft is an n-gram."""


@dataclass(frozen=True)
class DrafterFile:
    """A drafter as vLLM loads it."""

    version: int
    """Counts publications; 0 is what the run started with."""
    config: str
    """Text of config.json."""
    weights: bytes
    """A safetensors file in the rollout's dtype, without embedding and head (vLLM shares the policy's)."""
    fingerprint: str
    """`verl_tlt.drafter.fingerprint` of the weights."""
    acceptance: tuple[float, ...] = ()
    """Conditional acceptance expected at each draft position, from held-out sequences; empty: unknown."""


@dataclass
class HiddenStateShard:
    """What one rank holds of the captured window of one sequence."""

    row: int
    """Number of the sequence in its group's batch."""
    tokens: np.ndarray
    """int64 [L], the whole window's on every rank."""
    prompt_len: int
    """Tokens of the window that belong to the prompt."""
    start: int
    """Position of the window in the sequence."""
    last: int
    """The policy's number of layers: under it `states` holds what goes into the final norm."""
    stretches: tuple[tuple[int, int], ...]
    """Tokens [begin, end) of the window that this rank holds, in the order of the states' rows."""
    states: dict[int, np.ndarray] = field(default_factory=dict)
    """Inputs of layers, 16 bits [n, H] (see `to_numpy16`), of those this rank computes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(s.nbytes for s in self.states.values())
