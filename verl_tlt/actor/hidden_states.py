"""Copies the policy's hidden states while verl computes old log-probs: what the drafter learns from.

The drafter learns from the inputs of three policy layers and from the last hidden state before the final norm (EAGLE-3;
TLT section 5). Hooks on each rank copy the chosen tokens of the layers that it has, and the spot trainer joins them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_tlt.actor.adapters import EngineAdapter, TokenSpan, window
from verl_tlt.drafter import to_numpy16
from verl_tlt.drafter.data import within
from verl_tlt.drafter.held_out import digest_of
from verl_tlt.messages.training import HiddenStateShard

if TYPE_CHECKING:
    from tensordict import TensorDict

logger = logging.getLogger(__name__)

ROW = "tlt_row"
"""Key of each sequence's row number in a batch: verl's micro-batching, which reorders rows, carries it along."""


class HiddenStateCapture:
    """Hooks on an engine's layers, which record while armed, in evaluation forwards only; `dtype` has 16 bits."""

    def __init__(self, adapter: EngineAdapter, aux_layers: Sequence[int], dtype: torch.dtype) -> None:
        self.adapter = adapter
        self.dtype = dtype
        # The final norm's input is pre-norm; what Hugging Face returns as last is not.
        self.wanted = (*sorted(aux_layers), adapter.layers)
        self.chosen: dict[int, tuple[int, int]] = {}  # row → window (start, stop) to record
        self.taken: list[HiddenStateShard] = []
        self.seconds = 0.0  # that the capture's own work took since `arm`
        self.errors = 0  # micro-batches that could not be captured
        self._logged = False
        self.counts_tokens = 0
        """The policy's vocabulary where the responses of the next batch are counted by token; else 0."""
        self.token_counts: np.ndarray | None = None
        self._open: _MicroBatch | None = None  # the micro-batch that is being computed, if it is recorded
        for index, module in adapter.points():
            if index in self.wanted:
                module.register_forward_pre_hook(self._hook(index), with_kwargs=True)
        adapter.intercept(self._around)

    def arm(self, windows: Mapping[int, tuple[int, int]]) -> None:
        """Record the window (start, stop) of rows of the coming batch."""
        self.chosen = dict(windows)
        self.taken = []
        self.seconds = 0.0

    def count(self, batch: TensorDict) -> None:
        """Count the tokens of a batch's responses, if that was asked for; once (`CapturedStates.token_counts`)."""
        if not self.counts_tokens:
            return
        ids = batch["input_ids"].values()
        ends = batch["input_ids"].offsets()[1:].tolist()
        lengths = response_lengths(batch)
        responses = torch.cat([ids[end - length : end] for end, length in zip(ends, lengths, strict=True)])
        sampled = _sampled(batch)
        if sampled is not None:
            responses = responses[sampled.values().bool()]
        self.token_counts = torch.bincount(responses.long(), minlength=self.counts_tokens).cpu().numpy()
        self.counts_tokens = 0

    def take(self) -> list[HiddenStateShard]:
        """What was recorded of the chosen rows on this rank, in row order; disarms."""
        taken = sorted(self.taken, key=lambda shard: shard.row)
        self.chosen = {}
        self.taken = []
        return taken

    def _hook(self, index: int) -> Callable[..., None]:
        def keep(_module: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            if self._open is not None:
                with self.contained():
                    self._open.slice(index, args[0] if args else kwargs["hidden_states"])

        return keep

    def _around(self, micro_batch: TensorDict, forward_only: bool, forward: Callable[[], object]) -> object:
        if not (forward_only and self.chosen and ROW in micro_batch):
            return forward()
        rows = micro_batch[ROW].tolist()
        if not any(row in self.chosen for row in rows):
            return forward()
        with self.contained():
            self._open = _MicroBatch(self, micro_batch, rows)
        try:
            output = forward()
        finally:
            recorded = self._open
            self._open = None
        if recorded is not None:
            recorded.synchronize()
            with self.contained():
                self.taken += recorded.shards(self.wanted)
        return output

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Time the capture's own work; a failure ends the recording of this micro-batch, and nothing of it is kept."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:  # the log-probs are right; only the drafter goes without these sequences
            self._open = None
            self.errors += 1
            log = logger.debug if self._logged else logger.exception
            self._logged = True
            log("the hidden states of a micro-batch could not be captured: %s", error)
        finally:
            self.seconds += time.perf_counter() - start


class _MicroBatch:
    """The chosen tokens of one micro-batch, layer after layer: a layer's other tokens are free once it has run."""

    def __init__(self, capture: HiddenStateCapture, micro_batch: TensorDict, rows: Sequence[int]) -> None:
        self._adapter = capture.adapter
        self._dtype = capture.dtype
        self._batch = micro_batch
        ids = micro_batch["input_ids"]  # jagged [B, L_b]: prompt and response without padding
        self._offsets = ids.offsets().tolist()
        self._lengths = [b - a for a, b in itertools.pairwise(self._offsets)]
        self._rows = {i: row for i, row in enumerate(rows) if row in capture.chosen}  # place in this micro-batch → row
        self._windows = {i: capture.chosen[row] for i, row in self._rows.items()}  # place → (start, stop)
        self._spans: dict[int, list[TokenSpan]] = {}  # place → the parts of its window on this rank
        self._slices: dict[int, dict[int, torch.Tensor]] = {}  # layer → place → states [n, H]

    def slice(self, layer: int, state: torch.Tensor) -> None:
        """Copy the chosen tokens out of a layer's input, in 16 bits, where it is."""
        located = self._adapter.locate(state.detach(), self._lengths)
        slices = self._slices[layer] = {}
        for i, (start, stop) in self._windows.items():
            axis, spans = located[i]
            chosen = window(spans, start, stop)
            if chosen:
                self._spans[i] = chosen  # the same under every layer
                slices[i] = torch.cat([axis[s.at : s.at + s.stop - s.start].to(self._dtype) for s in chosen])

    def synchronize(self) -> None:
        """Wait until a GPU has computed the states: the time of their copy is then not that of the forward."""
        if any(state.is_cuda for slices in self._slices.values() for state in slices.values()):
            torch.cuda.current_stream().synchronize()

    def shards(self, wanted: tuple[int, ...]) -> list[HiddenStateShard]:
        """The chosen tokens of each sequence, copied to the host."""
        ids = self._batch["input_ids"].values()
        responses = response_lengths(self._batch)
        foreign = foreign_stretches(self._batch)
        layers = tuple(sorted(self._slices))
        shards = []
        for i, spans in self._spans.items():
            start, stop = self._windows[i]
            begin = self._offsets[i]  # of this sequence in the jagged values
            prompt_len = self._lengths[i] - responses[i]
            prompt = ids[begin : begin + prompt_len].tolist()
            shards.append(
                HiddenStateShard(
                    row=self._rows[i],
                    tokens=ids[begin + start : begin + stop].to("cpu", torch.int64, copy=True).numpy(),
                    prompt_len=max(0, prompt_len - start),
                    prompt=digest_of(prompt, images_of(self._batch, i, foreign[i])),
                    start=start,
                    stretches=tuple((s.start - start, s.stop - start) for s in spans),
                    wanted=wanted,
                    layers=layers,
                    states=to_numpy16(self._on_host(i, layers)),
                    foreign=within([(prompt_len + a, prompt_len + b) for a, b in foreign[i]], start, stop),
                )
            )
        return shards

    def _on_host(self, i: int, layers: Sequence[int]) -> torch.Tensor:
        """Move the states of one sequence to the host: [layers, n, H]. Its place on the device is free afterwards."""
        states = [self._slices[layer].pop(i) for layer in layers]
        host = torch.empty((len(layers), *states[0].shape), dtype=self._dtype)
        for target, state in zip(host, states, strict=True):
            target.copy_(state)
        return host


def images_of(micro_batch: TensorDict, row: int, foreign: Sequence[tuple[int, int]] = ()) -> list[torch.Tensor]:
    """The tensors of the images in a row's prompt, as verl hands them to the policy; empty for a prompt of text.

    It is also empty where tools answered (`foreign`): verl does not tell their images from the prompt's.
    """
    rows = micro_batch.get("multi_modal_inputs", None)
    if rows is None or foreign:
        return []
    inputs = getattr(rows[row], "data", rows[row]) or {}  # out of tensordict's wrapper
    return [value for _, value in sorted(inputs.items()) if isinstance(value, torch.Tensor)]


def response_lengths(micro_batch: TensorDict) -> list[int]:
    """Response tokens of each sequence, from whichever of verl's two forms the batch has."""
    key = "responses" if "responses" in micro_batch else "response_mask"
    value = micro_batch[key]
    if value.is_nested:
        return value.offsets().diff().tolist()
    return micro_batch["response_mask"].sum(-1).long().tolist()


def _sampled(micro_batch: TensorDict) -> Any:
    """Jagged [B, R_b]: which tokens of each response the policy sampled; None where the batch does not say."""
    mask = micro_batch.get("response_mask", None)
    return mask if mask is not None and mask.is_nested else None


def foreign_stretches(micro_batch: TensorDict) -> list[list[tuple[int, int]]]:
    """By sequence the tokens [begin, end) of its response that the policy did not sample: tools' answers, as a rule."""
    sampled = _sampled(micro_batch)
    if sampled is None:
        return [[] for _ in range(len(micro_batch))]
    mask = sampled.values().bool().cpu().numpy()
    offsets = sampled.offsets().tolist()
    found = []
    for begin, end in itertools.pairwise(offsets):
        around = np.concatenate([[True], mask[begin:end], [True]])
        edges = np.flatnonzero(around[1:] != around[:-1]).tolist()  # begin, end, begin, end, ...
        found.append(list(zip(edges[::2], edges[1::2], strict=True)))
    return found
