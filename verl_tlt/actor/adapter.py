"""What the tap has to know of a training engine: the protocol that the adapters of FSDP and Megatron fulfil."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from verl_tlt.actor.token_layout import Stretch
from verl_tlt.errors import TLTError

Around = Callable[[Any, bool, Callable[[], Any]], Any]
"""(micro-batch, forward_only, the engine's own forward step) -> what that step returns."""


class Untapped(TLTError, ValueError):
    """An engine or layout whose hidden states cannot be had; one sentence that says why and names the key."""


class Adapter(Protocol):
    """What the tap has to know of a training engine."""

    layers: int
    """Decoder layers of the policy."""

    def points(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """(number, module) of the decoder layers on this rank, and (`layers`, module) of the final norm."""
        ...

    def intercept(self, around: Around) -> None:
        """Call `around` in place of every forward step of the engine."""
        ...

    def locate(self, state: torch.Tensor, lengths: Sequence[int]) -> list[tuple[torch.Tensor, list[Stretch]]]:
        """For each sequence of the micro-batch: its token axis [N, H] in a layer's input, and what of it lies there.

        Args:
            state: what a hook saw in the forward step that has just ended.
            lengths: tokens of each sequence.
        """
        ...
