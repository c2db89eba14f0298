"""One rollout as the drafter's teacher: its tokens and the policy's hidden states, in 16 bits.

Between processes the states travel as numpy, because Ray's object store hands numpy arrays to every process of a node
without a copy, which it does not do for torch tensors. numpy has no bfloat16, so those arrays hold its bits as uint16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch


def to_numpy16(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` on the host in 16 bits: float16 as it is, anything else as bfloat16 bits in uint16; same shape."""
    if tensor.dtype == torch.float16:
        return tensor.detach().cpu().contiguous().numpy()
    return tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint16).numpy()


def from_numpy16(array: np.ndarray) -> torch.Tensor:
    """The tensor behind `to_numpy16`: uint16 as bfloat16 bits, floats as they are. A read-only array is copied."""
    if not array.flags.writeable:  # arrays out of Ray's store are; torch has no read-only tensors
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


@dataclass(frozen=True)
class Sequence:
    """A prompt with its response, or a window of one, as the policy saw it in one forward pass.

    Index t is local to the window; its position in the whole sequence is `start + t`.
    """

    tokens: torch.Tensor
    """int64 [L]."""
    prompt_len: int
    """Tokens of the window that belong to the prompt: `tokens[prompt_len:]` is response; 0 when none does."""
    aux: torch.Tensor
    """[L, 3H], any float (16 bits in buffers): the aux layers' inputs at t, side by side, in ascending layer order."""
    last: torch.Tensor
    """[L, H], any float: the last layer's output at t *before* the final norm; it predicts token t+1."""
    start: int = 0
    """Position of `tokens[0]` in the whole sequence."""

    def __post_init__(self) -> None:
        """Refuse tensors that do not belong together."""
        length = len(self.tokens)
        if self.aux.shape[0] != length or self.last.shape[0] != length:
            raise ValueError(
                f"A sequence of {length} tokens came with {self.aux.shape[0]} aux and {self.last.shape[0]} last states."
            )

    def __len__(self) -> int:
        """Tokens in the window."""
        return len(self.tokens)

    def window(self, begin: int, end: int) -> Sequence:
        """Tokens `begin:end` at their true positions; views, no copies."""
        return replace(
            self,
            tokens=self.tokens[begin:end],
            aux=self.aux[begin:end],
            last=self.last[begin:end],
            prompt_len=max(self.prompt_len - begin, 0),
            start=self.start + begin,
        )
