"""verl's FSDP engine (FSDP and FSDP2) as the tap sees it: a Hugging Face model, wrapped.

Packed or padded, with or without LoRA, with Ulysses sequence parallelism or without. Parameters are sharded over ranks,
but activations are whole: a rank computes its own sequences, or with Ulysses its slice of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from verl_tlt.actor.adapter import Around, Untapped
from verl_tlt.actor.token_layout import Stretch, even_split
from verl_tlt.drafter import DrafterError
from verl_tlt.drafter.decoder import find_decoder


class FSDPAdapter:
    """See `actor.adapter.Adapter`.

    Args:
        engine: `verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead`.

    Raises:
        Untapped: the model's decoder is not found.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        try:
            self._decoder = find_decoder(unwrapped(engine.module), "actor_rollout_ref.model.path")
        except DrafterError as error:
            raise Untapped(str(error)) from error
        self.layers = len(self._decoder.layers)
        self._slice = torch.distributed.get_rank(engine.ulysses_parallel_group) if engine.use_ulysses_sp else None

    def points(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """Every layer is on every rank."""
        yield from enumerate(self._decoder.layers)
        yield self.layers, self._decoder.norm

    def intercept(self, around: Around) -> None:
        """Shadow the engine's method with an attribute of the instance."""
        original = self._engine.forward_step

        def forward_step(micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
            return around(micro_batch, forward_only, lambda: original(micro_batch, loss_function, forward_only))

        self._engine.forward_step = forward_step

    def locate(self, state: torch.Tensor, lengths: Sequence[int]) -> list[tuple[torch.Tensor, list[Stretch]]]:
        """Packed: one row [1, sum L_b, H], padded at its end; otherwise right-padded rows [B, max L_b, H]."""
        if state.shape[0] == len(lengths) and self._slice is None:  # also a packed batch of one: the same thing
            return [(state[i], [Stretch(0, length, 0)]) for i, length in enumerate(lengths)]
        found, begin = [], 0
        for length in lengths:
            held = [Stretch(0, length, begin)]
            if self._slice is not None:  # rank r computes the r-th slice of the packed row
                held = even_split(held, state.shape[1], self._slice)
            found.append((state[0], held))
            begin += length
        return found


def unwrapped(module: Any) -> Any:
    """The Hugging Face model inside FSDP and peft wrappers."""
    module = getattr(module, "_fsdp_wrapped_module", module)
    return module.get_base_model() if hasattr(module, "peft_config") else module
