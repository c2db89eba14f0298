"""The drafter's own buffers, kept on the host for the time after a sleep.

vLLM's sleep level 2 (verl's default) gives the memory of all weights back. Before 0.28 it saves the buffers of the
policy and not those of the drafter, whose table of rotary positions is its own where its context differs from the
policy's: it comes back as garbage, no file holds it, and acceptance is gone while every weight is right. So they are
copied once, when the models have been loaded, written back with every load, and looked at by the fingerprint.
"""

from __future__ import annotations

import torch


class DrafterBuffers:
    """Buffers of the drafter that are not the policy's, as they were when the models were loaded."""

    def __init__(self, drafter: torch.nn.Module, target: torch.nn.Module) -> None:
        self._kept = {name: buffer.to("cpu", copy=True) for name, buffer in own_buffers(drafter, target).items()}

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(buffer.nbytes for buffer in self._kept.values())

    def restore(self, drafter: torch.nn.Module) -> None:
        """Write them back in place, so that captured graphs still see them."""
        live = dict(drafter.named_buffers())
        with torch.no_grad():
            for name, kept in self._kept.items():
                live[name].copy_(kept)

    def damaged(self, drafter: torch.nn.Module) -> list[str]:
        """Names of those whose live values are no longer what was kept, bit by bit."""
        live = dict(drafter.named_buffers())
        return [name for name, kept in self._kept.items() if not _same_bits(live[name], kept)]


def own_buffers(drafter: torch.nn.Module, target: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The drafter's buffers by name, without those it shares with the policy (vLLM builds one rotary table for both
    where their settings agree).
    """
    theirs = {buffer.data_ptr() for buffer in target.buffers()}
    return {name: b.detach() for name, b in drafter.named_buffers() if b.numel() and b.data_ptr() not in theirs}


def _same_bits(live: torch.Tensor, kept: torch.Tensor) -> bool:
    """NaN differs from itself, so bytes are compared."""
    one, other = (tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in (live, kept))
    return torch.equal(one, other)
