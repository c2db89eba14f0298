"""Errors of an accelerator after which a process can use it no more, and the end of such a process.

After a device assertion or an illegal access CUDA answers every further call of that process with the same error. A new
process can train on the device again, so a spot worker ends itself, and the trainer replaces it as one that has died.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

DEVICE_ERRORS = (torch.cuda.CudaError, *filter(None, [getattr(torch, "AcceleratorError", None)]))
"""Types that say it without words."""
LIBRARY = re.compile(
    r"\b(CUDA|HIP|cuDNN|MIOpen|cuBLAS|cuSOLVER|cuSPARSE|cuFFT|NCCL|RCCL)( driver| runtime| unknown)? error\b"
    r"|\bTriton Error \[(CUDA|HIP)\]|\bdevice-side assert\b",
    re.IGNORECASE,
)
"""How torch, Triton and CUDA's libraries begin what they raise as a plain RuntimeError."""
MEMORY = re.compile(r"out of memory|_STATUS_ALLOC_FAILED|MemoryAllocation\b", re.IGNORECASE)
"""In what they raise where memory is short: the process may go on."""


def spoils_device(error: BaseException) -> bool:
    """Whether this process cannot use its device any more: an error of CUDA, or of a library on it, other than one of
    memory that is short; also where it is the cause of `error`, or `error` was raised while it was handled.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if _of_a_device(link) and not MEMORY.search(str(link)):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def _of_a_device(error: BaseException) -> bool:
    told = isinstance(error, RuntimeError) and LIBRARY.search(str(error)) is not None
    return isinstance(error, DEVICE_ERRORS) or (told and not isinstance(error, torch.OutOfMemoryError))


@contextmanager
def ending_with_its_device() -> Iterator[None]:
    """End this process, at once and without clean-up, where the block raises an error that `spoils_device`."""
    try:
        yield
    except Exception as error:
        if spoils_device(error):
            logger.critical("this spot worker can use its device no more, and ends so that another one can: %s", error)
            os._exit(1)  # what Python would clear away first is on the device, and may hang
        raise
