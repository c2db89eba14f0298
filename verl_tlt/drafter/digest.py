"""A name for a set of weights that both ends of a publication compute for themselves.

The trainer holds q, k, v, gate and up projections apart in float32; vLLM holds them fused, in its serving dtype. So the
fingerprint sums exact bit patterns, group by group, in a way that stacking along the first dimension does not change:
equal means the engine serves what was published, in this dtype, to the bit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import torch

_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
_LEFT_OUT = ("embed_tokens", "lm_head", "verifier_norm", "draft_id_to_target_id", "d2t", "t2d")
"""The policy's tensors, and index tables that one side keeps as parameters and the other as offsets."""
_CHUNK = 1 << 22
"""Elements summed at a time: bounds the int64 copies."""


def fingerprint(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None
) -> str:
    """Hex digest of a drafter's own weights; the same from a file and from vLLM's `named_parameters()`.

    Args:
        tensors: name and tensor, in speculators' names or vLLM's (with `model.` in front, fused or not). The policy's
            embedding and head are left out, since vLLM shares them.
        dtype: what to cast to first, i.e. the serving dtype; None: as they are.

    Returns:
        Sixteen hex digits over, per fused group and ordered by name: dtype, element count, and the wrapping int64 sums
        of the elements' bit patterns, of their squares, and of the patterns times their column.
    """
    groups: dict[str, list[int]] = {}
    kinds: dict[str, str] = {}
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if any(part in name for part in _LEFT_OUT):
            continue
        group = _group(name)
        sums = _sums(tensor.detach() if dtype is None else tensor.detach().to(dtype))
        held = groups.setdefault(group, [0, 0, 0, 0])
        groups[group] = [_wrap(a + b) for a, b in zip(held, sums, strict=True)]
        kinds[group] = str(dtype or tensor.dtype)
    text = "\n".join(f"{name} {kinds[name]} {groups[name]}" for name in sorted(groups))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _group(name: str) -> str:
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    for pattern, fused in _FUSED:
        name = pattern.sub(fused, name)
    return name


def _sums(tensor: torch.Tensor) -> list[int]:
    """`[count, sum, sum of squares, sum by column]` of the bit patterns, wrapping at 64 bits."""
    view = {2: torch.int16, 4: torch.int32}.get(tensor.element_size())
    if view is None:
        raise ValueError(f"A fingerprint takes 16- and 32-bit tensors, not {tensor.dtype}.")
    columns = tensor.shape[-1] if tensor.ndim else 1
    rows = tensor.contiguous().view(view).reshape(-1, max(1, columns))  # [R, C]
    weights = torch.arange(1, rows.shape[1] + 1, device=tensor.device)  # [C]
    total = [tensor.numel(), 0, 0, 0]
    for part in torch.split(rows, max(1, _CHUNK // max(1, columns))):
        bits = part.long()
        found = (0, int(bits.sum()), int((bits * bits).sum()), int((bits * weights).sum()))
        total = [_wrap(a + b) for a, b in zip(total, found, strict=True)]
    return total


def _wrap(value: int) -> int:
    """`value` as a signed 64-bit integer, as torch's int64 sums wrap."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
