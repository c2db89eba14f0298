"""Where a training engine has the policy's layers, and which tokens of a sequence lie on this rank.

An engine puts the sequences of a micro-batch on one *token axis* (packed) or on one axis each (padded), and may split
that axis over ranks: evenly (Ulysses, Megatron's sequence parallelism) or in two chunks of every sequence (Megatron's
context parallelism). The capture knows an engine only as an `EngineAdapter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from verl_tlt.drafter.capture import find_decoder
from verl_tlt.errors import DrafterError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

Around = Callable[["TensorDict", bool, Callable[[], object]], object]
"""(micro-batch, forward_only, the engine's own forward step) -> what that step returns."""
EngineAdapter: TypeAlias = "FSDPAdapter | MegatronAdapter"


@dataclass(frozen=True)
class TokenSpan:
    """Neighbouring tokens of one sequence that lie side by side on a rank's token axis."""

    start: int  # first token, counted in the sequence
    stop: int  # token after the last
    at: int  # index of the first one on the axis


def adapt(engine: BaseEngine) -> EngineAdapter:
    """The adapter for one of verl's engines; a `DrafterError` where there is none for it or its way to split work."""
    strategy = engine.engine_config.strategy
    if strategy in ("fsdp", "fsdp2"):
        return FSDPAdapter(engine)
    if strategy == "megatron":
        return MegatronAdapter(engine)
    raise DrafterError(f"actor_rollout_ref.actor.strategy={strategy} has no hidden-state capture.")


class FSDPAdapter:
    """verl's FSDP engine (FSDP and FSDP2): a Hugging Face model, with LoRA or without; activations are whole.

    A rank computes its own sequences, or with Ulysses sequence parallelism its slice of them.
    """

    def __init__(self, engine: FSDPEngineWithLMHead) -> None:
        self._engine = engine
        module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
        model = module.get_base_model() if hasattr(module, "peft_config") else module
        self._decoder = find_decoder(model, "actor_rollout_ref.model.path")
        self.layers = len(self._decoder.layers)
        """Decoder layers of the policy."""
        self._slice = torch.distributed.get_rank(engine.ulysses_parallel_group) if engine.use_ulysses_sp else None

    def points(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """(number, module) of the decoder layers on this rank, here all, and (`layers`, module) of the final norm."""
        yield from enumerate(self._decoder.layers)
        yield self.layers, self._decoder.norm

    # Changes verl: patches/README.md#hidden-states-are-taken-from-the-old-log-prob-pass
    def intercept(self, around: Around) -> None:
        """Call `around` in place of every forward step of the engine: the instance's attribute shadows the method."""
        original = self._engine.forward_step

        def forward_step(micro_batch: TensorDict, loss_function: object, forward_only: bool) -> object:
            return around(micro_batch, forward_only, lambda: original(micro_batch, loss_function, forward_only))

        self._engine.forward_step = forward_step

    def locate(self, state: torch.Tensor, lengths: Sequence[int]) -> list[tuple[torch.Tensor, list[TokenSpan]]]:
        """(token axis [N, H] in a layer's input, spans) for each sequence of a micro-batch; `lengths`: their tokens.

        `state` is packed, one row [1, sum L_b, H] padded at its end, or right-padded rows [B, max L_b, H].
        """
        if state.shape[0] == len(lengths) and self._slice is None:  # also a packed batch of one: the same thing
            return [(state[i], [TokenSpan(0, length, 0)]) for i, length in enumerate(lengths)]
        located = []
        begin = 0  # of the sequence on the axis
        for length in lengths:
            spans = [TokenSpan(0, length, begin)]
            if self._slice is not None:  # rank r computes the r-th slice of the packed row
                spans = even_split(spans, state.shape[1], self._slice)
            located.append((state[0], spans))
            begin += length
        return located


class MegatronAdapter:
    """verl's Megatron engine: megatron-core GPT models, whose tokens and layers are split over ranks in three ways.

    A `DrafterError` for other layouts of context parallelism than zigzag. Other layouts whose hidden states cannot be
    captured are found before the run starts (`checks.rules.why_no_capture`).

    Pipeline parallelism splits layers; the last stage has the final norm. Context parallelism gives a rank two chunks
    of every sequence. Sequence parallelism slices what is left; without it the first rank of a tensor-parallel group
    copies.
    """

    def __init__(self, engine: MegatronEngineWithLMHead) -> None:
        from megatron.core import parallel_state
        from verl.utils.megatron_utils import unwrap_model

        chunks = [unwrap_model(chunk) for chunk in engine.module]
        if not all(hasattr(chunk, "decoder") for chunk in chunks):
            raise DrafterError(f"actor_rollout_ref.model.path is a {type(chunks[0]).__name__}, without a decoder.")
        if any(engine._get_context_parallel_layout(chunk) != "zigzag" for chunk in chunks):
            raise DrafterError("This policy's attention splits sequences over context-parallel ranks in another way.")
        self._engine = engine
        self._decoders = [chunk.decoder for chunk in chunks]
        config = chunks[0].config
        self.layers = config.num_layers
        self._cp = parallel_state.get_context_parallel_rank()
        self._cp_size = parallel_state.get_context_parallel_world_size()
        self._tp = parallel_state.get_tensor_model_parallel_rank()
        self._tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self._split = bool(config.sequence_parallel)  # over the ranks of a tensor-parallel group
        self._packed: torch.Tensor | None = None
        """Where each packed sequence begins, with its padding; None: each sequence has an axis of its own."""
        self._begins: list[int] | None = None  # the same on the host, once the micro-batch's first layer has asked

        def note_packing(_decoder: object, _args: object, kwargs: dict[str, Any]) -> None:
            # verl pads each sequence, and by how much depends on several settings.
            packed = kwargs.get("packed_seq_params")
            self._packed = None if packed is None else packed.cu_seqlens_q_padded
            self._begins = None

        for decoder in self._decoders:
            decoder.register_forward_pre_hook(note_packing, with_kwargs=True)

    def points(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """As `FSDPAdapter.points`; nothing where another rank of the tensor-parallel group has the same."""
        if self._tp and not self._split:
            return
        for decoder in self._decoders:
            yield from ((layer.layer_number - 1, layer) for layer in decoder.layers)
            if decoder.final_layernorm is not None:
                yield self.layers, decoder.final_layernorm

    def intercept(self, around: Around) -> None:
        """As `FSDPAdapter.intercept`; this engine's method draws its micro-batch from an iterator."""
        engine = self._engine
        original = engine.forward_step

        def forward_step(batches: Iterator[TensorDict], model: object, *args: object, **kwargs: object) -> object:
            micro_batch = next(batches)
            again = iter([micro_batch])
            return around(micro_batch, engine.mode == "eval", lambda: original(again, model, *args, **kwargs))

        engine.forward_step = forward_step

    def locate(self, state: torch.Tensor, lengths: Sequence[int]) -> list[tuple[torch.Tensor, list[TokenSpan]]]:
        """As `FSDPAdapter.locate`; packed is one axis [T, 1, H], padded one for each [S, B, H]."""
        size = state.shape[0]
        if self._begins is None and self._packed is not None:
            self._begins = self._packed.tolist()  # waits for the device, so once a micro-batch
        begins = self._begins
        located = []
        for i, length in enumerate(lengths):
            if begins is None:  # an axis for each sequence
                axis = state[:, i]
                at = 0
                padded = size * self._cp_size * (self._tp_size if self._split else 1)
            else:  # one axis for all, of which each context-parallel rank has an equal part of each sequence
                axis = state[:, 0]
                at = begins[i] // self._cp_size
                padded = begins[i + 1] - begins[i]
            spans = zigzag(length, padded, at, self._cp, self._cp_size)
            if self._split:
                spans = even_split(spans, size, self._tp)
            located.append((axis, spans))
        return located


def zigzag(length: int, padded: int, at: int, rank: int, ranks: int) -> list[TokenSpan]:
    """One sequence's spans on a context-parallel rank: chunks `rank` and `-1 - rank` of `2 * ranks` equal ones.

    `padded`: length with the padding that makes chunks equal; `at`: index on the axis where the first span begins.
    """
    if ranks == 1:
        return [TokenSpan(0, length, at)]
    chunk = padded // (2 * ranks)
    first = rank * chunk
    second = (2 * ranks - 1 - rank) * chunk
    pieces = [TokenSpan(first, first + chunk, at), TokenSpan(second, second + chunk, at + chunk)]
    return window(pieces, 0, length)  # without the padding


def even_split(spans: Iterable[TokenSpan], size: int, rank: int) -> list[TokenSpan]:
    """The parts of `spans` on one of the ranks that share the axis evenly: indices [rank * size, (rank + 1) * size)."""
    low = rank * size
    high = low + size
    parts = []
    for span in spans:
        # Indices of the span's part on the whole axis.
        first = max(span.at, low)
        after = min(span.at + span.stop - span.start, high)
        if first < after:
            to_token = span.start - span.at  # what to add to an index for the token there
            parts.append(TokenSpan(first + to_token, after + to_token, first - low))
    return parts


def window(spans: Iterable[TokenSpan], start: int, stop: int) -> list[TokenSpan]:
    """The parts of `spans` that lie in tokens [start, stop) of the sequence."""
    parts = []
    for span in spans:
        first = max(span.start, start)
        after = min(span.stop, stop)
        if first < after:
            parts.append(TokenSpan(first, after, span.at + first - span.start))
    return parts
