"""Memory of the host that an accelerator copies from and to at full speed, without the processor: page-locked.

It is one block for all that belongs together. `pin_memory` takes the next power of two of each tensor's bytes (torch's
`CachingHostAllocator`): what a worker keeps for a 7B policy would be 8.6 GB instead of 4.8.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes; no kernel and no copy engine asks for more."""


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
