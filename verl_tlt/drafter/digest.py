"""Fingerprints of a drafter's weights: trainer and engine compute one each, and compare them after a publish.

vLLM fuses the projections q, k, v and gate, up. So a fingerprint is made of sums of bit patterns, fused group by fused
group, which stacking along the first dimension does not change: equal means that the engine serves what was published,
in this dtype, to the bit. Sums of parts add up, so the ranks of a tensor-parallel engine each sum their own shard.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from verl_tlt.drafter.tensor_file import is_stack, stacked

_LEFT_OUT = ("embed_tokens", "verifier_lm_head", "verifier_norm", "t2d")
"""The policy's tensors, and the map that vLLM does not read; `d2t` names the same tokens (`drafter.check`)."""
_HEAD = "lm_head"
_OFFSETS = "d2t"
"""The map of draft ids to tokens: all zeros in vLLM, and in no file, where the draft vocabulary is whole."""
_CHUNK = 1 << 22
"""Elements summed at a time: bounds the int64 copies."""

Sums = dict[str, tuple[str, list[int]]]
"""By fused group: dtype, and the four sums over some or all of its elements."""


def fingerprint(tensors: Mapping[str, torch.Tensor], own_head: bool = False) -> str:
    """Sixteen hex digits over a drafter's own weights, by the names of a file or of vLLM's parameters.

    Embedding and head, the policy's, are left out; `own_head`: the head is the drafter's.
    """
    return combined([partial_sums(((name, tensor, 0) for name, tensor in tensors.items()), own_head)])


def partial_sums(shards: Iterable[tuple[str, torch.Tensor, int]], own_head: bool = False) -> Sums:
    """What one rank contributes to the fingerprint; `own_head` is `fingerprint`'s.

    `shards` are name, tensor and how many of the whole tensor's columns lie before it; each element is on one rank.
    """
    sums: Sums = {}
    left_out = _LEFT_OUT if own_head else (*_LEFT_OUT, _HEAD)
    for name, tensor, columns_before in shards:
        if any(part in name for part in left_out):
            continue
        group, tensor = stacked(name), tensor.detach()
        if tensor.ndim == 1 and is_stack(group):
            tensor = tensor[:, None]  # a bias: where an element is in the stack does not matter, as in a matrix
        if group == _OFFSETS and not tensor.any():
            continue
        _add(sums, group, str(tensor.dtype), _sums(tensor, columns_before))
    return sums


def combined(parts: Iterable[Sums]) -> str:
    """The fingerprint of the whole from all ranks' parts."""
    whole: Sums = {}
    for part in parts:
        for group, (kind, sums) in part.items():
            _add(whole, group, kind, sums)
    text = "\n".join(f"{name} {whole[name][0]} {whole[name][1]}" for name in sorted(whole))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def own_shards(
    live: Mapping[str, torch.Tensor], file: Mapping[str, torch.Tensor], rank: int, size: int
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """What one tensor-parallel rank sums up, as `partial_sums` takes it: all ranks together sum every element once.

    vLLM splits tensors by rows or columns, keeps others whole, and repeats KV heads where there are fewer than ranks.
    Which it did shows in the shapes of `live` (the rank's parameters) and `file` (the whole drafter's).
    """
    whole: dict[str, list[torch.Tensor]] = {}
    for name, tensor in file.items():
        whole.setdefault(stacked(name), []).append(_matrix(tensor))
    for name, tensor in live.items():
        tensor = _matrix(tensor)
        parts = whole.get(stacked(name), [tensor])
        rows = sum(part.shape[0] for part in parts)
        if tensor.ndim == 2 and tensor.shape[1] < parts[0].shape[1]:
            yield name, tensor, rank * tensor.shape[1]
        elif tensor.shape[0] == rows:
            if rank == 0:
                yield name, tensor, 0
        elif tensor.shape[0] * size != rows and ".qkv_proj." in name:
            keys = min(part.shape[0] for part in parts)  # rows of all KV heads; the queries have more
            queries = (rows - 2 * keys) // size
            copies = (tensor.shape[0] - queries) // 2 * size // keys
            yield name, tensor[: queries if rank % copies else None], 0
        else:
            yield name, tensor, 0


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The rows [E R, C] of all experts' tensor [E, R, C], which vLLM may split by experts, or each expert's by rows."""
    return tensor.flatten(0, 1) if tensor.ndim == 3 else tensor


def _add(into: Sums, group: str, kind: str, sums: list[int]) -> None:
    before = into[group][1] if group in into else [0, 0, 0, 0]
    into[group] = kind, (torch.tensor(before) + torch.tensor(sums)).tolist()  # wraps at 64 bits


def _sums(tensor: torch.Tensor, columns_before: int) -> list[int]:
    """Count, sum, sum of squares and sum times column of the bit patterns, wrapping at 64 bits."""
    view = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    bits = tensor.contiguous().view(view)
    columns = bits.shape[-1] if bits.ndim else 1
    rows = bits.reshape(-1, max(1, columns))  # [R, C]
    weights = torch.arange(1, rows.shape[1] + 1, device=tensor.device) + columns_before  # [C]
    total = weights.new_zeros(3)
    for part in torch.split(rows, max(1, _CHUNK // max(1, columns))):
        bits = part.long()
        total += torch.stack([bits.sum(), (bits * bits).sum(), (bits * weights).sum()])
    return [tensor.numel(), *total.tolist()]
