"""Zeros for some rows of a matrix on an accelerator: a Triton kernel that touches no other row, and waits for nothing.

Torch has no such operation: which rows it is, the device alone knows, and a masked fill reads and writes all of them.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

BLOCK = 4096


@triton.jit
def _kernel(values, ends, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + row.to(tl.int64) * width + column, 0.0, mask=column < tl.load(ends + row))


def empty_rows(values: torch.Tensor, chosen: torch.Tensor) -> None:
    """Fill rows of `values` (float [N, V], contiguous) with zeros where `chosen` (bool [N]) says so, in place."""
    rows, width = values.shape
    ends = chosen.to(torch.int32) * width  # [N]: how many of a row's columns are emptied
    _kernel[(rows, triton.cdiv(width, BLOCK))](values, ends, width, BLOCK=BLOCK)
