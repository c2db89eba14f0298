"""Take hidden states out of the old-log-prob forward that RL runs anyway, for the sequences chosen beforehand.

The drafter learns from the inputs of three policy layers and from the last hidden state before the final norm
(EAGLE-3; TLT section 5). verl's engines compute exactly these, with the weights that produced the rollout, so forward
hooks copy the chosen tokens and nothing else: sequences that were not chosen cost nothing.

What differs between engines is behind an `Adapter` (`actor.adapter`): where the layers are, and which tokens
of a sequence lie on this rank. Each rank copies its own share; `spot_worker.shards` puts the shares together.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from verl_tlt.actor.adapter import Adapter
from verl_tlt.actor.token_layout import Stretch, window
from verl_tlt.drafter import to_numpy16
from verl_tlt.messages import HiddenStateShard

logger = logging.getLogger(__name__)

ROW = "tlt_row"
"""Key under which each sequence's row number rides through verl's micro-batching, which reorders rows."""


class HiddenStateTap:
    """Hooks on an engine's layers; records while armed, in evaluation forwards only.

    Args:
        adapter: of the engine.
        aux_layers: layers whose inputs are kept, as `eagle_aux_hidden_state_layer_ids` counts them.
        dtype: 16-bit dtype of what is kept (the rollout's).
    """

    def __init__(self, adapter: Adapter, aux_layers: Sequence[int], dtype: torch.dtype) -> None:
        self.adapter, self.aux_layers, self.dtype = adapter, tuple(aux_layers), dtype
        self.last = adapter.layers  # the final norm's input is pre-norm; what Hugging Face returns as last is not
        self.chosen: dict[int, tuple[int, int]] = {}
        self.taken: dict[int, HiddenStateShard] = {}
        self.seconds = 0.0
        self.errors = 0
        self._states: dict[int, torch.Tensor] = {}
        self._recording = False
        for index, module in adapter.points():
            if index in {*self.aux_layers, self.last}:
                module.register_forward_pre_hook(self._hook(index), with_kwargs=True)
        adapter.intercept(self._around)

    def arm(self, windows: Mapping[int, tuple[int, int]]) -> None:
        """Record rows of the coming batch: {row: (start, stop)}, the stretch of its tokens to keep.

        Ranks that compute the same batch must all be given the same windows.
        """
        self.chosen, self.taken, self.seconds = dict(windows), {}, 0.0

    def take(self) -> list[HiddenStateShard]:
        """What was recorded of each chosen row on this rank, in row order; disarms."""
        taken = [self.taken[row] for row in sorted(self.taken)]
        self.chosen, self.taken = {}, {}
        return taken

    def _hook(self, index: int) -> Callable[..., None]:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._recording:
                self._states[index] = (args[0] if args else kwargs["hidden_states"]).detach()

        return keep

    def _around(self, micro_batch: Any, forward_only: bool, forward: Callable[[], Any]) -> Any:
        rows = micro_batch[ROW].tolist() if self.chosen and ROW in micro_batch else []
        self._recording = forward_only and any(row in self.chosen for row in rows)
        try:
            output = forward()
        finally:
            states, self._states = self._states, {}
            recording, self._recording = self._recording, False
        if recording and states:
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
        lengths = [b - a for a, b in itertools.pairwise(offsets)]
        responses = response_lengths(micro_batch)
        for index, state in states.items():
            for i, (axis, held) in enumerate(self.adapter.locate(state, lengths)):
                if rows[i] not in self.chosen:
                    continue
                start, stop = self.chosen[rows[i]]
                if not (stretches := window(held, start, stop)):
                    continue
                part = self.taken.get(rows[i])
                if part is None:
                    begin = offsets[i]  # of this sequence in the jagged values
                    part = self.taken[rows[i]] = HiddenStateShard(
                        row=rows[i],
                        tokens=tokens[begin + start : begin + stop].to("cpu", torch.int64, copy=True).numpy(),
                        prompt_len=max(0, lengths[i] - responses[i] - start),
                        start=start,
                        last=self.last,
                        stretches=tuple((s.start - start, s.stop - start) for s in stretches),
                    )
                part.states[index] = self._copy(axis, stretches)

    def _copy(self, axis: torch.Tensor, stretches: Sequence[Stretch]) -> Any:
        pieces = [axis[s.at : s.at + s.stop - s.start] for s in stretches]
        piece = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return to_numpy16(piece.to("cpu", self.dtype, copy=True))  # [n, H]


def response_lengths(micro_batch: Any) -> list[int]:
    """Response tokens of each sequence, from whichever of verl's two forms the batch has."""
    key = "responses" if "responses" in micro_batch else "response_mask"
    value = micro_batch[key]
    if value.is_nested:
        return value.offsets().diff().tolist()
    return micro_batch["response_mask"].sum(-1).long().tolist()
