"""verl's Megatron engine as the tap sees it: megatron-core GPT models, whose tokens and layers are split over ranks.

Three splits meet here. Pipeline parallelism: a rank has some of the layers (several runs of them when interleaved), and
the final norm is on the last stage. Context parallelism: a rank has two chunks of every sequence. Sequence parallelism:
of what is left, the ranks of a tensor-parallel group have a slice each; without it they all have the same, and the
first one copies it. Data-parallel ranks are groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from verl_tlt.actor.adapter import Around, Untapped
from verl_tlt.actor.token_layout import Stretch, even_split, zigzag


class MegatronAdapter:
    """See `actor.adapter.Adapter`.

    Args:
        engine: `verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead`.

    Raises:
        Untapped: sequences are scheduled over ranks anew in every step, or split in another way than zigzag; layers
            are sharded by Megatron-FSDP, or are not those of a GPT model.
    """

    def __init__(self, engine: Any) -> None:
        from megatron.core import parallel_state
        from verl.utils.megatron_utils import unwrap_model

        if engine.engine_config.dynamic_context_parallel:
            raise Untapped(
                "actor_rollout_ref.actor.megatron.dynamic_context_parallel=True deals sequences out to ranks anew in "
                "every step, and the hidden-state tap relies on their staying together."
            )
        if engine.engine_config.use_megatron_fsdp:
            raise Untapped(
                "actor_rollout_ref.actor.megatron.use_megatron_fsdp=True shards layers in a way that the hidden-state "
                "tap was never tried with."
            )
        chunks = [unwrap_model(chunk) for chunk in engine.module]
        if not all(hasattr(chunk, "decoder") for chunk in chunks):
            raise Untapped(f"actor_rollout_ref.model.path is a {type(chunks[0]).__name__}, without a decoder.")
        if any(engine._get_context_parallel_layout(chunk) != "zigzag" for chunk in chunks):
            raise Untapped("This policy's attention splits sequences over context-parallel ranks in another way.")
        self._engine = engine
        self._decoders = [chunk.decoder for chunk in chunks]
        config = chunks[0].config
        self.layers = config.num_layers
        self._cp = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        self._tp = parallel_state.get_tensor_model_parallel_rank()
        self._split = bool(config.sequence_parallel)  # over the ranks of a tensor-parallel group
        self._tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self._begins: list[int] | None = None  # of packed sequences with their padding; None: one axis each
        for decoder in self._decoders:
            decoder.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _decoder: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        """Note how this micro-batch is packed: verl pads each sequence, and by how much depends on several settings."""
        packed = kwargs.get("packed_seq_params")
        self._begins = None if packed is None else packed.cu_seqlens_q_padded.tolist()

    def points(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """What this rank computes; nothing where another rank of the tensor-parallel group has the same."""
        if self._tp and not self._split:
            return
        for decoder in self._decoders:
            yield from ((layer.layer_number - 1, layer) for layer in decoder.layers)
            if decoder.final_layernorm is not None:
                yield self.layers, decoder.final_layernorm

    def intercept(self, around: Around) -> None:
        """Shadow the engine's method, which draws its micro-batch from an iterator, by an attribute of the instance."""
        engine, original = self._engine, self._engine.forward_step

        def forward_step(batch_iter: Iterator[Any], model: Any, *args: Any, **kwargs: Any) -> Any:
            micro_batch = next(batch_iter)
            again = iter([micro_batch])
            return around(micro_batch, engine.mode == "eval", lambda: original(again, model, *args, **kwargs))

        engine.forward_step = forward_step

    def locate(self, state: torch.Tensor, lengths: Sequence[int]) -> list[tuple[torch.Tensor, list[Stretch]]]:
        """Packed: one axis [T, 1, H]; otherwise an axis for each sequence, [S, B, H], as long as the longest."""
        size = state.shape[0]
        rank, ranks = self._cp
        if self._begins is None:
            padded = size * ranks * (self._tp_size if self._split else 1)
            held = [zigzag(length, padded, 0, rank, ranks) for length in lengths]
        else:
            edges = self._begins
            held = [
                zigzag(length, edges[i + 1] - edges[i], edges[i] // ranks, rank, ranks)
                for i, length in enumerate(lengths)
            ]
        if self._split:
            held = [even_split(stretches, size, self._tp) for stretches in held]
        packed = self._begins is not None
        return [(state[:, 0 if packed else i], stretches) for i, stretches in enumerate(held)]
