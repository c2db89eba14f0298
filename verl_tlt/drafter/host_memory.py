"""Memory of the host that an accelerator copies from and to at full speed, without the processor: page-locked.

It is one block for all that belongs together. `pin_memory` takes the next power of two of each tensor's bytes (torch's
`CachingHostAllocator`): what a worker keeps for a 7B policy would be 8.6 GB instead of 4.8.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes; no kernel and no copy engine asks for more."""
BLOCK = 1 << 27
"""Bytes that a `LockedPool` grows by."""


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(where each begins, bytes of all) of tensors of so many bytes, side by side in one block."""
    ends = list(accumulate((size + -size % ALIGNMENT for size in sizes), initial=0))
    return ends[:-1], ends[-1]


def views(block: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes in `block`, uint8 [bytes], as `layout` places them; as many as it holds."""
    begins, _ = layout([t.nbytes for t in like])
    inside = [(t, begin) for t, begin in zip(like, begins, strict=True) if begin + t.nbytes <= len(block)]
    return [block[begin : begin + t.nbytes].view(t.dtype).view(t.shape) for t, begin in inside]


def page_locked(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], page-locked where CUDA is and for as long as this tensor lives; not a byte more is taken.

    Memory that cannot be locked is ordinary memory: copies are slower then, and the log says so.
    """
    block = torch.empty(nbytes, dtype=torch.uint8)
    if torch.cuda.is_available() and nbytes:
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(cuda.cudaHostRegister(block.data_ptr(), nbytes, 0))
        if error:
            _forget_refusal()
            logger.warning("%d MiB could not be page-locked (CUDA error %d): copies are slower", nbytes >> 20, error)
        else:
            weakref.finalize(block, _unlock, block.data_ptr()).atexit = False
    return block


def _unlock(address: int) -> None:
    """Give back what `page_locked` locked."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cuda.cudaHostUnregister(address)):
        _forget_refusal()


def _forget_refusal() -> None:
    """Clear the error that a refused call leaves in CUDA's runtime. Whoever launches the next kernel would get it: verl
    in its weight sync, say. A launch raises the error and clears it, so this is one.
    """
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


class LockedPool:
    """Page-locked memory that is handed out piece by piece, and all of it anew after `reset`: for what is copied off a
    device in every step. It keeps what it has, which is what the largest step took, in blocks.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used: list[int] = []  # bytes handed out of each

    @property
    def nbytes(self) -> int:
        """All that it has."""
        return sum(map(len, self._blocks))

    def reset(self) -> None:
        """What was handed out will be overwritten."""
        self._used = [0] * len(self._blocks)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with any contents, valid until the next `reset`."""
        nbytes = math.prod(shape) * dtype.itemsize
        fits = (i for i, block in enumerate(self._blocks) if self._used[i] + nbytes <= len(block))
        if (found := next(fits, None)) is None:
            found = len(self._blocks)
            self._blocks.append(page_locked(max(BLOCK, nbytes)))
            self._used.append(0)
        begin = self._used[found]
        self._used[found] = layout([begin + nbytes])[1]
        return self._blocks[found][begin : begin + nbytes].view(dtype).view(*shape)
