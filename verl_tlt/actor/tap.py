"""Take hidden states out of the old-log-prob forward that RL runs anyway, for the sequences chosen beforehand.

The drafter learns from the inputs of three policy layers and from the last hidden state before the final norm
(EAGLE-3; TLT section 5). verl's engines compute exactly these, with the weights that produced the rollout, so forward
hooks copy the chosen tokens and nothing else: sequences that were not chosen cost nothing.

What differs between engines is behind an `Adapter` (`actor.adapter`): where the layers are, and which tokens
of a sequence lie on this rank. Each rank copies what it has, once, into the arrays that travel; `spot_worker.shards`
puts them together.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_tlt.actor.adapter import Adapter
from verl_tlt.actor.token_layout import Stretch, window
from verl_tlt.drafter import to_numpy16
from verl_tlt.messages.training import HiddenStateShard

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
        self.adapter, self.dtype = adapter, dtype
        # The final norm's input is pre-norm; what Hugging Face returns as last is not.
        self.wanted = (*sorted(aux_layers), adapter.layers)
        self.chosen: dict[int, tuple[int, int]] = {}
        self.taken: list[HiddenStateShard] = []
        self.seconds = 0.0
        self.errors = 0
        self._states: dict[int, torch.Tensor] = {}
        self._recording = False
        for index, module in adapter.points():
            if index in self.wanted:
                module.register_forward_pre_hook(self._hook(index), with_kwargs=True)
        adapter.intercept(self._around)

    def arm(self, windows: Mapping[int, tuple[int, int]]) -> None:
        """Record rows of the coming batch: {row: (start, stop)}, the stretch of its tokens to keep.

        Ranks that compute the same batch must all be given the same windows.
        """
        self.chosen, self.taken, self.seconds = dict(windows), [], 0.0

    def take(self) -> list[HiddenStateShard]:
        """What was recorded of the chosen rows on this rank, in row order; disarms."""
        taken = sorted(self.taken, key=lambda shard: shard.row)
        self.chosen, self.taken = {}, []
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
        layers = tuple(sorted(states))
        located = [self.adapter.locate(states[layer], lengths) for layer in layers]
        found = []
        for i, row in enumerate(rows):
            if row not in self.chosen:
                continue
            start, stop = self.chosen[row]
            stretches = window(located[0][i][1], start, stop)  # the same under every layer
            if not stretches:
                continue
            begin = offsets[i]  # of this sequence in the jagged values
            found.append(
                HiddenStateShard(
                    row=row,
                    tokens=tokens[begin + start : begin + stop].to("cpu", torch.int64, copy=True).numpy(),
                    prompt_len=max(0, lengths[i] - responses[i] - start),
                    start=start,
                    stretches=tuple((s.start - start, s.stop - start) for s in stretches),
                    wanted=self.wanted,
                    layers=layers,
                    states=self._copy([sequences[i][0] for sequences in located], stretches),
                )
            )
        self.taken += found  # of a micro-batch that fails on the way, nothing

    def _copy(self, axes: Sequence[torch.Tensor], stretches: Sequence[Stretch]) -> np.ndarray:
        """16 bits [layers, n, H] out of each layer's token axis [N, H]; cast on the device, copied once."""
        kept = torch.empty(len(axes), sum(s.stop - s.start for s in stretches), axes[0].shape[-1], dtype=self.dtype)
        for layer, axis in zip(kept, axes, strict=True):
            at = 0
            for s in stretches:
                after = at + s.stop - s.start
                layer[at:after].copy_(axis[s.at : s.at + s.stop - s.start])
                at = after
        return to_numpy16(kept)


def response_lengths(micro_batch: Any) -> list[int]:
    """Response tokens of each sequence, from whichever of verl's two forms the batch has."""
    key = "responses" if "responses" in micro_batch else "response_mask"
    value = micro_batch[key]
    if value.is_nested:
        return value.offsets().diff().tolist()
    return micro_batch["response_mask"].sum(-1).long().tolist()
