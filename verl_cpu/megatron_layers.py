"""Layers with Transformer Engine's names and parameters, from megatron-core's own parts and torch's attention.

verl's Megatron engine takes its layers from Transformer Engine, which needs CUDA. The parameters have the same names
here, so that a bridge finds the weights it knows. Imported once megatron-core is.
"""

import itertools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class Norm(torch.nn.RMSNorm):
    """`TENorm` for root-mean-square norms; megatron-core's own does not go with sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_others: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        shared_by_slices(self.weight, config)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """`TELayerNormColumnParallelLinear`: the norm before a linear layer is part of it, as `layer_norm_weight`."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__(input_size, output_size, config=config, **others)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        shared_by_slices(self.layer_norm_weight, config)
        self.eps = config.layernorm_epsilon

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Norm, then the linear layer: [..., input_size] to [..., output_size of this rank]."""
        normed = torch.nn.functional.rms_norm(input_, (self.input_size,), self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """For checkpoints: the linear layer's parameters are split over ranks, the norm's is not."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0, "bias": 0}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


class PackedAttention(MegatronModule):
    """`TEDotProductAttention`: causal, within packed sequences, which context-parallel ranks share in zigzag order."""

    def __init__(self, config: Any, *_args: Any, **_kwargs: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Any, key: Any, value: Any, *_args: Any, packed_seq_params: Any = None, **_kw: Any) -> Any:
        """Queries, keys and values [T, heads, D] packed, or [S, B, heads, D]; the same with heads and D as one axis."""
        group = parallel_state.get_context_parallel_group()
        ranks, rank = group.size(), group.rank()
        if packed := packed_seq_params is not None:
            edges = packed_seq_params.cu_seqlens_q_padded.tolist()
            query, key, value = (x[:, None] for x in (query, key, value))
        else:  # one sequence to a row, padded at its end
            edges = [0, query.shape[0] * ranks]
        keys, values = (gathered(x, group).chunk(ranks) for x in (key, value))  # of each rank
        out = query.new_zeros(query.shape)  # what pads a batch to a bucket belongs to no sequence
        for begin, end in itertools.pairwise(edge // ranks for edge in edges):  # a rank's share of each sequence
            places = [zigzag_places(end - begin, r, ranks) for r in range(ranks)]
            seen = places[rank][:, None] >= torch.cat(places)
            parts = query[begin:end], torch.cat([k[begin:end] for k in keys]), torch.cat([v[begin:end] for v in values])
            q, k, v = (x.permute(1, 2, 0, 3) for x in parts)  # [B, heads, N, D]
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            out[begin:end] = attended.permute(2, 0, 1, 3)
        out = out.flatten(2)
        return out[:, 0] if packed else out


class ExpertsLinear(MegatronModule):
    """`TEGroupedLinear`: a linear layer of each of this rank's experts, `weight0`, `weight1`, and so on.

    Which tokens come here, and the sums over ranks, are the token dispatcher's affair.
    """

    axis: int
    """Of a weight [out, in], the one that expert-tensor-parallel ranks share out."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool,
        pg_collection: Any, **_others: Any,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        if bias:
            raise NotImplementedError("The experts' layers on a CPU have no bias.")
        self.num_gemms, self.groups = num_gemms, pg_collection
        shape = [output_size, input_size]
        shape[self.axis] //= pg_collection.expt_tp.size()
        for i in range(num_gemms):
            weight: Any = torch.nn.Parameter(init_method(torch.empty(shape, dtype=config.params_dtype)))
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=self.axis, stride=1)
            weight.allreduce = config.expert_model_parallel_size == 1  # else its gradients are summed over copies alone
            self.register_parameter(f"weight{i}", weight)

    @property
    def weights(self) -> list[torch.Tensor]:
        """[num_gemms] of [out, in]."""
        return [self.get_parameter(f"weight{i}") for i in range(self.num_gemms)]

    def forward(self, x: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        """Tokens [T, in], sorted by expert, to [T, out]; there is no bias."""
        parts = zip(torch.split(x, tokens_per_expert), self.weights, strict=True)
        return torch.cat([torch.nn.functional.linear(part, weight) for part, weight in parts]), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """For checkpoints: one tensor of all experts, of which each rank has some."""
        found: dict[str, Any] = {}
        ranks, rank, copy = self.groups.ep.size(), self.groups.ep.rank(), self.groups.expt_dp.rank()
        for i, weight in enumerate(self.weights):
            expert = len(sharded_offsets), rank * self.num_gemms + i, ranks * self.num_gemms
            (sharded,) = make_sharded_tensors_for_checkpoint(
                {"weight": weight}, prefix, {"weight": self.axis}, (*sharded_offsets, expert),
                tp_group=self.groups.expt_tp, dp_cp_group=metadata["dp_cp_group"],
            ).values()  # fmt: skip
            sharded.replica_id = (*sharded.replica_id[:2], copy)
            found[f"{prefix}weight{i}"] = sharded
        return found


class ExpertsColumns(ExpertsLinear):
    """`TEColumnParallelGroupedLinear`."""

    axis = 0


class ExpertsRows(ExpertsLinear):
    """`TERowParallelGroupedLinear`."""

    axis = 1


class LayerProvider(LocalSpecProvider):
    """`TESpecProvider`: which modules a layer is made of; linear layers are megatron-core's own."""

    def fuse_layernorm_and_linear(self) -> bool:
        """As Transformer Engine does."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """A norm and a linear layer in one module."""
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **_others: Any) -> type:
        """Every other norm."""
        return Norm

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *_others: bool) -> Any:
        """The experts of a mixture: (module, what it is made of)."""
        return TEGroupedMLP, MLPSubmodules(linear_fc1=ExpertsColumns, linear_fc2=ExpertsRows)

    def core_attention(self) -> type:
        """Attention without its projections."""
        return PackedAttention


def shared_by_slices(weight: Any, config: Any) -> None:
    """Mark a weight that every rank of a tensor-parallel group applies to its slice: gradients are summed over them."""
    weight.sequence_parallel = config.sequence_parallel


def zigzag_places(share: int, rank: int, ranks: int) -> torch.Tensor:
    """Positions [share] in a sequence of those of its tokens that a context-parallel rank has, in its order."""
    chunks = torch.arange(share * ranks).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]]) if ranks > 1 else torch.arange(share)


def gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """All ranks' rows, in rank order."""
    if group.size() == 1:
        return tensor
    gather: Any = _Gathered.apply
    rows: torch.Tensor = gather(tensor, group)
    return rows


class _Gathered(torch.autograd.Function):
    """torch's own differentiable gather names ranks of the world, not of the group, with gloo."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
