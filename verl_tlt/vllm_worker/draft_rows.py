"""Triton kernels that replace rows of a drafter's probabilities or logits, on the device and without a wait.

Torch has no such operation: which rows it is, the device alone knows, and a masked fill reads and writes all of them.
"""

import torch
from vllm.triton_utils import tl, triton

BLOCK = 4096


@triton.jit
def _empty(values, ends, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + row.to(tl.int64) * width + column, 0.0, mask=column < tl.load(ends + row))


def empty_rows(values: torch.Tensor, chosen: torch.Tensor) -> None:
    """Fill rows of `values` (float [N, V], contiguous) with zeros where `chosen` (bool [N]) says so, in place."""
    rows, width = values.shape
    ends = chosen.to(torch.int32) * width  # [N]: how many of a row's columns are emptied
    _empty[(rows, triton.cdiv(width, BLOCK))](values, ends, width, BLOCK=BLOCK)


@triton.jit
def _replace(logits, per_slot, per_step, slots, drafts, per_draft, broken, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001
    row, step = tl.program_id(0), tl.program_id(1)
    start = logits + tl.load(slots + row).to(tl.int64) * per_slot + step.to(tl.int64) * per_step
    unbounded, finite = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(start + column, mask=column < width, other=float("-inf")).to(tl.float32)
        unbounded += tl.where(values < float("inf"), 0, 1)  # NaN too, which is less than nothing
        finite += tl.where(values > float("-inf"), 1, 0)
    is_broken = (tl.sum(unbounded) > 0) | (tl.sum(finite) == 0)
    tl.store(broken + row * tl.num_programs(1) + step, tl.where(is_broken, 1, 0))
    if is_broken:
        token = tl.load(drafts + row * per_draft + step)
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(start + column, tl.where(column == token, 0.0, float("-inf")), mask=column < width)


def make_certain(logits: torch.Tensor, slots: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Replace logits that are no distribution by those of a certain draft, in place; returns which, int32 [N, K].

    `logits`, float [slots, K_max, V], are looked at in the rows of `slots`, int [N], and in the first K steps;
    `drafts`, int [N, K], is what was drafted. A row is broken that holds NaN or infinity, or nothing above minus
    infinity.
    """
    broken = torch.empty(drafts.shape, dtype=torch.int32, device=logits.device)
    strides = logits.stride(0), logits.stride(1)
    _replace[tuple(drafts.shape)](
        logits, *strides, slots, drafts, drafts.stride(0), broken, logits.shape[2], BLOCK=BLOCK
    )
    return broken
