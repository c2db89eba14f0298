"""Take hidden states out of the old-log-prob forward that RL runs anyway, for the sequences chosen beforehand.

The drafter learns from the inputs of three policy layers and from the last hidden state before the final norm
(EAGLE-3; TLT section 5). verl's FSDP engine computes exactly these, with the weights that produced the rollout, so
forward hooks copy the chosen rows and nothing else: sequences that were not chosen cost nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from verl_tlt.drafter import Sequence as DrafterSequence

logger = logging.getLogger(__name__)

ROW = "tlt_row"
"""Key under which each sequence's row number rides through verl's micro-batching, which reorders rows."""


class HiddenStateTap:
    """Hooks on an FSDP engine's module; records while armed, in evaluation forwards only.

    Args:
        engine: verl's FSDP engine (`verl/workers/engine/fsdp/transformer_impl.py`): `.module`, `.forward_step`.
        aux_layers: layers whose inputs are kept, as `eagle_aux_hidden_state_layer_ids` counts them.
        dtype: 16-bit dtype of what is kept (the rollout's).

    Raises:
        ValueError: the engine splits sequences over ranks; no rank then sees a whole one.
    """

    def __init__(self, engine: Any, aux_layers: Sequence[int], dtype: torch.dtype) -> None:
        if getattr(engine, "use_ulysses_sp", False):
            raise ValueError(
                "Spot training cannot tap sequences that are split over ranks; set "
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1 or tlt.spot.enable=False."
            )
        self.engine, self.aux_layers, self.dtype = engine, tuple(aux_layers), dtype
        self.chosen: dict[int, tuple[int, int]] = {}
        self.taken: dict[int, DrafterSequence] = {}
        self.seconds = 0.0
        self.errors = 0
        self._states: dict[int, torch.Tensor] = {}
        self._recording = False
        model = engine.module.model
        self._last = len(model.layers)
        for index in sorted({*self.aux_layers, self._last}):
            # The final norm's input is the pre-norm last state; what Hugging Face returns as last is post-norm.
            module = model.norm if index == self._last else model.layers[index]
            module.register_forward_pre_hook(self._hook(index), with_kwargs=True)
        self._forward_step = engine.forward_step
        engine.forward_step = self._tapped_forward_step

    def arm(self, windows: Mapping[int, tuple[int, int]]) -> None:
        """Record rows of the coming batch: {row: (start, stop)}, the stretch of its tokens to keep."""
        self.chosen, self.taken, self.seconds = dict(windows), {}, 0.0

    def take(self) -> list[DrafterSequence]:
        """What was recorded, in row order; disarms."""
        taken = [self.taken[row] for row in sorted(self.taken)]
        self.chosen, self.taken = {}, {}
        return taken

    def _hook(self, index: int) -> Callable[..., None]:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._recording:
                self._states[index] = (args[0] if args else kwargs["hidden_states"]).detach()

        return keep

    def _tapped_forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        rows = micro_batch[ROW].tolist() if self.chosen and ROW in micro_batch else []
        self._recording = forward_only and any(row in self.chosen for row in rows)
        try:
            output = self._forward_step(micro_batch, loss_function, forward_only)
        finally:
            states, self._states = self._states, {}
            recording, self._recording = self._recording, False
        if recording:
            start = time.perf_counter()
            try:
                self._collect(micro_batch, rows, states)
            except Exception as error:  # the log-probs are right; only the drafter goes without these sequences
                self.errors += 1
                log = logger.exception if self.errors == 1 else logger.debug
                log("the tap could not keep the hidden states of a micro-batch: %s", error)
            self.seconds += time.perf_counter() - start
        return output

    def _collect(self, micro_batch: Any, rows: list[int], states: dict[int, torch.Tensor]) -> None:
        ids = micro_batch["input_ids"]  # jagged [B, L_b]: prompt and response without padding
        offsets, tokens = ids.offsets().tolist(), ids.values()
        # With remove-padding verl runs one packed row [1, sum L_b, H]; otherwise right-padded rows [B, max L_b, H].
        packed = states[self._last].shape[0] == 1 and len(rows) > 1
        responses = response_lengths(micro_batch)
        for i, row in enumerate(rows):
            if row not in self.chosen:
                continue
            start, stop = self.chosen[row]
            begin = offsets[i]  # of this sequence in the jagged values

            def cut(h: torch.Tensor, i: int = i, a: int = begin, start: int = start, stop: int = stop) -> torch.Tensor:
                piece = h[0, a + start : a + stop] if packed else h[i, start:stop]
                return piece.to("cpu", self.dtype, copy=True)  # [stop - start, H]

            prompt = offsets[i + 1] - begin - responses[i]
            self.taken[row] = DrafterSequence(
                tokens=tokens[begin + start : begin + stop].to("cpu", torch.int64, copy=True),
                prompt_len=max(0, prompt - start),
                aux=torch.cat([cut(states[layer]) for layer in self.aux_layers], dim=-1),  # [stop - start, 3H]
                last=cut(states[self._last]),
                start=start,
            )


def response_lengths(micro_batch: Any) -> list[int]:
    """Response tokens of each sequence, from whichever of verl's two forms the batch has."""
    key = "responses" if "responses" in micro_batch else "response_mask"
    value = micro_batch[key]
    if value.is_nested:
        return value.offsets().diff().tolist()
    return micro_batch["response_mask"].sum(-1).long().tolist()
