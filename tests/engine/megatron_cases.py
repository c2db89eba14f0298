"""Layouts of verl's Megatron engine over four processes, run one after the other.

Engine, schedules, splitting and collectives are verl's and megatron-core's own. What needs an accelerator has a
stand-in here: torch.cuda's random state and current device, the packed attention and the norm of Transformer Engine,
and the bridge that builds a model from Hugging Face weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from actor import LAYERS, make_batch, make_rows
from torch.overrides import TorchFunctionMode

RANKS = 4
LENGTHS = [[(4, 20), (6, 30), (3, 12), (5, 1)], [(3, 9), (8, 41), (7, 7), (2, 26)]]


@dataclass(frozen=True)
class Case:
    """One layout; what the sizes leave of four ranks is data-parallel."""

    policy: str
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    sequence_parallel: bool = True
    packed: bool = True
    engine: Mapping[str, Any] = field(default_factory=dict)
    """More settings of `McoreEngineConfig`."""


CASES = {
    "tensor 2, sequence parallel, pipeline 2": Case("qwen3", tensor=2, pipeline=2),
    "tensor 2, context 2": Case("llama", tensor=2, context=2),
    "pipeline 2, context 2, padded to a bucket": Case(
        "qwen3", pipeline=2, context=2, engine={"pad_to_length": True, "pad_to_length_bucket": 96}
    ),
    "interleaved pipeline 2": Case("llama", pipeline=2, virtual=2),
    "tensor 2, unpacked": Case("llama", tensor=2, sequence_parallel=False, packed=False),
    "tensor 2, sequence parallel, context 2, unpacked": Case("qwen3", tensor=2, context=2, packed=False),
    "pipeline 4": Case("llama", pipeline=4),
}


def use_cpu() -> None:
    """Give torch.cuda the little that megatron-core asks of it; before megatron-core is imported."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    torch.cuda.synchronize = lambda *_args: None
    import megatron.core.tensor_parallel.random as random_state

    random_state._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    random_state._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()


class CudaIsCpu(TorchFunctionMode):
    """What is made on "cuda", pinned for it or sent there stays on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def run_cases(rank: int, port: int, root: str, names: list[str]) -> None:
    """One rank: for each case its data-parallel rank, shards and errors, left in `<root>/<case>-<rank>.pt`."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    use_cpu()
    from megatron.core import parallel_state

    for name in names:
        actor = build_case(CASES[name], Path(root))
        group = actor.engine.get_data_parallel_rank()
        rows = make_rows(LENGTHS[group], seed=group)
        found = {}
        for window in (10_000, 11):
            actor.tap_budget, actor.tap_window = 10_000, window
            with CudaIsCpu():
                actor.infer_batch(make_batch(rows, 60, compute_loss=False))
            found[window] = (group, actor.tap.take(), actor.tap.errors)
        torch.save(found, f"{root}/{name}-{rank}.pt")
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def build_case(case: Case, root: Path) -> Any:
    """The actor of a case on this rank, with the tap installed."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, TrainingWorkerConfig
    from verl.workers.engine.base import EngineRegistry

    from verl_tlt.actor.tap import HiddenStateTap
    from verl_tlt.actor.worker import TLTTrainingWorker, adapt

    registry = EngineRegistry._engines["language_model"]["megatron"]
    registry[os.environ["VERL_ENGINE_DEVICE"]] = local_engine()
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=str(root / case.policy), use_remove_padding=case.packed),
        engine_config=McoreEngineConfig(
            tensor_model_parallel_size=case.tensor, pipeline_model_parallel_size=case.pipeline,
            virtual_pipeline_model_parallel_size=case.virtual, context_parallel_size=case.context,
            sequence_parallel=case.sequence_parallel, forward_only=True, **case.engine,
        ),
        optimizer_config=None, checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    actor = TLTTrainingWorker(config)
    actor.reset()
    actor.tap = HiddenStateTap(adapt(actor.engine), LAYERS, torch.bfloat16)
    return actor


def local_engine() -> type:
    """verl's engine with models of megatron-core's local layers."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    class LocalEngine(MegatronEngineWithLMHead):
        def _build_tf_config(self) -> None:
            self.tf_config = transformer_config(self.model_config.hf_config, self.engine_config)
            self.is_value_model = False

        def _build_megatron_module(self) -> list[torch.nn.Module]:
            return build_chunks(self.tf_config, self.model_config)

    return LocalEngine


def transformer_config(hf: Any, sizes: Any) -> Any:
    """megatron-core's description of a Hugging Face policy of the Llama or Qwen3 family, in float32 on the CPU."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads, num_query_groups=hf.num_key_value_heads, kv_channels=hf.head_dim,
        normalization="RMSNorm", layernorm_epsilon=hf.rms_norm_eps, qk_layernorm=hf.model_type == "qwen3",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        tensor_model_parallel_size=sizes.tensor_model_parallel_size, context_parallel_size=sizes.context_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
        sequence_parallel=sizes.sequence_parallel, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall",
        pipeline_dtype=torch.float32, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip


def build_chunks(config: Any, policy: Any) -> list[torch.nn.Module]:
    """This rank's part of the policy: one GPT model, or several when the pipeline is interleaved."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from safetensors.torch import load_file

    hf, virtual = policy.hf_config, config.virtual_pipeline_model_parallel_size
    weights = load_file(Path(policy.local_path) / "model.safetensors")
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    own, attention = spec.submodules, spec.submodules.self_attention.submodules
    own.input_layernorm = own.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    attention.core_attention = packed_attention_class()
    count = config.num_layers // config.pipeline_model_parallel_size // (virtual or 1)
    chunks = []
    for stage in range(virtual or 1):
        place = {"vp_stage": stage if virtual else None}
        chunk = GPTModel(
            config, TransformerBlockSubmodules([spec] * count, Norm), vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings, position_embedding_type="rope",
            rotary_base=hf.rope_parameters["rope_theta"], share_embeddings_and_output_weights=False,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=not virtual, **place),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=not virtual, **place), **place,
        ).float()  # fmt: skip
        load_weights(chunk, weights, hf)
        chunks.append(chunk)
    return chunks


class Norm(torch.nn.RMSNorm):
    """Root-mean-square norm with megatron-core's arguments; its own does not go with sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_others: Any) -> None:
        super().__init__(hidden_size, eps=eps)


def load_weights(chunk: Any, weights: Mapping[str, torch.Tensor], hf: Any) -> None:
    """Fill a GPT model with this rank's shards of a Hugging Face policy's weights."""
    from megatron.core import parallel_state

    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()

    def shard(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(ranks, dim)[rank]

    found: dict[str, torch.Tensor] = {}
    for n, layer in enumerate(chunk.decoder.layers):
        old, new = f"model.layers.{layer.layer_number - 1}.", f"decoder.layers.{n}."
        groups, width = hf.num_key_value_heads, hf.head_dim
        parts = [weights[f"{old}self_attn.{x}_proj.weight"] for x in "qkv"]  # heads of a group side by side
        qkv = torch.cat([p.view(groups, -1, width, p.shape[-1]) for p in parts], dim=1)
        found[new + "self_attention.linear_qkv.weight"] = shard(qkv.reshape(-1, hf.hidden_size))
        found[new + "self_attention.linear_proj.weight"] = shard(weights[old + "self_attn.o_proj.weight"], 1)
        gated = [shard(weights[f"{old}mlp.{x}_proj.weight"]) for x in ("gate", "up")]
        found[new + "mlp.linear_fc1.weight"] = torch.cat(gated)
        found[new + "mlp.linear_fc2.weight"] = shard(weights[old + "mlp.down_proj.weight"], 1)
        found[new + "input_layernorm.weight"] = weights[old + "input_layernorm.weight"]
        found[new + "pre_mlp_layernorm.weight"] = weights[old + "post_attention_layernorm.weight"]
        if chunk.config.qk_layernorm:
            for x in "qk":
                found[f"{new}self_attention.{x}_layernorm.weight"] = weights[f"{old}self_attn.{x}_norm.weight"]
    if chunk.pre_process:
        found["embedding.word_embeddings.weight"] = shard(weights["model.embed_tokens.weight"])
    if chunk.post_process:
        found["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        found["output_layer.weight"] = shard(weights["lm_head.weight"])
    missing, unexpected = chunk.load_state_dict(found, strict=False)
    assert not unexpected and not [name for name in missing if not name.endswith("_extra_state")], (missing, unexpected)


def packed_attention_class() -> type:
    """Causal attention within packed sequences, which context-parallel ranks share in zigzag order."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    class PackedAttention(MegatronModule):
        def __init__(self, config: Any, *_args: Any, **_kwargs: Any) -> None:
            super().__init__(config=config)

        def forward(
            self, query: Any, key: Any, value: Any, *_args: Any, packed_seq_params: Any = None, **_kw: Any
        ) -> Any:
            group, ranks = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_world_size()
            if packed := packed_seq_params is not None:  # [T, heads, D]
                edges = packed_seq_params.cu_seqlens_q_padded.tolist()
                query, key, value = (x[:, None] for x in (query, key, value))
            else:  # [S, B, heads, D], padded at the end
                edges = [0, query.shape[0] * ranks]
            places = [global_places(edges, rank, ranks) for rank in range(ranks)]
            mine, others = places[group.rank()], torch.cat(places, dim=1)
            seen = (mine[0][:, None] == others[0]) & (mine[1][:, None] >= others[1])
            heads = [x.permute(1, 2, 0, 3) for x in (query, gathered(key, group), gathered(value, group))]
            out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
            out = out.permute(2, 0, 1, 3).flatten(2)  # [S, B, heads * D]
            return out[:, 0] if packed else out

    return PackedAttention


def global_places(edges: list[int], rank: int, ranks: int) -> torch.Tensor:
    """(sequence, position) [2, T / ranks] of the tokens of one context-parallel rank, in its order."""
    places = []
    for sequence in range(len(edges) - 1):
        own = torch.arange(edges[sequence + 1] - edges[sequence])
        if ranks > 1:
            chunks = own.chunk(2 * ranks)
            own = torch.cat([chunks[rank], chunks[-1 - rank]])
        places.append(torch.stack([torch.full_like(own, sequence), own]))
    return torch.cat(places, dim=1)


def gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """All ranks' rows, in rank order."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)
