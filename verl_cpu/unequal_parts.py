"""Collectives of parts that differ in length, which NCCL has and gloo has not: experts get as many tokens as come."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def gather(mine: torch.Tensor, lengths: Sequence[int], group: Any) -> torch.Tensor:
    """Every rank's rows [lengths[rank], ...], in rank order; `mine` are this rank's."""
    own = mine.new_zeros(max(lengths), *mine.shape[1:])
    own[: len(mine)] = mine
    padded = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(padded, own, group=group)
    return torch.cat([part[:length] for part, length in zip(padded, lengths, strict=True)])


def reduce_scatter(whole: torch.Tensor, lengths: Sequence[int], group: Any) -> torch.Tensor:
    """Of the sum of all ranks' `whole` [sum(lengths), ...], the rows [lengths[rank], ...] of this rank."""
    total = whole.clone()
    dist.all_reduce(total, group=group)
    return torch.split(total, list(lengths))[group.rank()]


# Changes megatron-core: verl_cpu/README.md#ranks-exchange-parts-of-unequal-length-over-gloo
def mend(module: Any) -> None:
    """Let `megatron.core.tensor_parallel.mappings` exchange parts of any length."""
    for name, exchange in (("_gather_along_first_dim", gather), ("_reduce_scatter_along_first_dim", reduce_scatter)):
        setattr(module, name, _with_lengths(getattr(module, name), exchange))


def _with_lengths(original: Any, exchange: Any) -> Any:
    @functools.wraps(original)
    def inner(tensor: torch.Tensor, group: Any, lengths: Any = None, *others: Any, **more: Any) -> torch.Tensor:
        if lengths is None or group.size() == 1:
            return original(tensor, group, lengths, *others, **more)
        return exchange(tensor.contiguous(), [int(length) for length in lengths], group)

    return inner
