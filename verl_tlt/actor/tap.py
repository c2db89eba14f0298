"""What a drafter learns from: hidden states of chosen sequences, and the weights that it shares with the policy.

The drafter learns from the inputs of three policy layers and from the last hidden state before the final norm (EAGLE-3;
TLT section 5). In the old-log-prob forward, hooks on each rank copy the chosen tokens of the layers it has;
the spot trainer joins them. States are heavy, so few sequences are chosen, and long ones are cut to a window.

Embedding, head and final norm are copied while a weight sync streams by. Everybody waits for the sync, and these parts
are large (2.2 GB for a 7B policy). So the first rank alone copies them to page-locked memory, and a thread puts them
into the object store during the next rollout. A failure costs the drafter its newest weights, not the sync.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_tlt.actor.adapters import EngineAdapter, TokenSpan, window
from verl_tlt.drafter import to_numpy16
from verl_tlt.drafter.data import within
from verl_tlt.drafter.held_out import digest_of
from verl_tlt.drafter.memory import page_locked, views
from verl_tlt.drafter.verifier import policy_part
from verl_tlt.messages.training import HiddenStateShard, VerifierArrays

if TYPE_CHECKING:
    from ray import ObjectRef
    from tensordict import TensorDict

logger = logging.getLogger(__name__)

ROW = "tlt_row"
"""Key of each sequence's row number in a batch: verl's micro-batching, which reorders rows, carries it along."""


class HiddenStateTap:
    """Hooks on an engine's layers, which record while armed, in evaluation forwards only; `dtype` has 16 bits."""

    def __init__(self, adapter: EngineAdapter, aux_layers: Sequence[int], dtype: torch.dtype) -> None:
        self.adapter = adapter
        self.dtype = dtype
        # The final norm's input is pre-norm; what Hugging Face returns as last is not.
        self.wanted = (*sorted(aux_layers), adapter.layers)
        self.chosen: dict[int, tuple[int, int]] = {}  # row → window (start, stop) to record
        self.taken: list[HiddenStateShard] = []
        self.seconds = 0.0  # that the tap's own work took since `arm`
        self.errors = 0  # micro-batches that could not be captured
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
        """Time the tap's own work; a failure ends the recording of this micro-batch, and nothing of it is kept."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:  # the log-probs are right; only the drafter goes without these sequences
            self._open = None
            self.errors += 1
            log = logger.exception if self.errors == 1 else logger.debug
            log("the hidden states of a micro-batch could not be captured: %s", error)
        finally:
            self.seconds += time.perf_counter() - start


class _MicroBatch:
    """The chosen tokens of one micro-batch, layer after layer: a layer's other tokens are free once it has run."""

    def __init__(self, tap: HiddenStateTap, micro_batch: TensorDict, rows: Sequence[int]) -> None:
        self._adapter = tap.adapter
        self._dtype = tap.dtype
        self._batch = micro_batch
        ids = micro_batch["input_ids"]  # jagged [B, L_b]: prompt and response without padding
        self._offsets = ids.offsets().tolist()
        self._lengths = [b - a for a, b in itertools.pairwise(self._offsets)]
        self._rows = {i: row for i, row in enumerate(rows) if row in tap.chosen}  # place in this micro-batch → row
        self._windows = {i: tap.chosen[row] for i, row in self._rows.items()}  # place → (start, stop)
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


def select_for_tap(lengths: Sequence[int], budget_tokens: int, rng: random.Random, window: int) -> list[int]:
    """Choose sequences to capture so that every length gets its share of the tokens, by systematic sampling.

    The expected captured tokens of a sequence are proportional to its length, up to all of it. Where the draw exceeds
    the budget, sequences picked at random are dropped. Returns indices into `lengths` (tokens of prompt and response),
    ascending; their costs min(length, window) sum to at most `budget_tokens`, and `window` is at most that.
    """
    if not lengths or budget_tokens <= 0:
        return []
    order = list(range(len(lengths)))
    rng.shuffle(order)  # equal lengths: no preference for the first row
    order.sort(key=lambda i: -lengths[i])
    length = np.array([lengths[i] for i in order], dtype=np.float64)  # [N], descending
    cost = np.minimum(length, window)
    chance = _chances(length / np.maximum(cost, 1), cost, budget_tokens)
    # One draw at every whole number of the running sum of chances, from a random offset.
    reached = np.floor(np.cumsum(chance) + rng.random() + 1e-9)
    drawn = np.diff(reached, prepend=0.0) > 0
    chosen = [(order[k], int(cost[k])) for k in np.flatnonzero(drawn)]
    spent = sum(c for _, c in chosen)
    while spent > budget_tokens:
        spent -= chosen.pop(rng.randrange(len(chosen)))[1]
    return sorted(i for i, _ in chosen)


def _chances(size: np.ndarray, cost: np.ndarray, budget: int) -> np.ndarray:
    """Chances [N] to be drawn, min(1, factor * size), whose expected cost is `budget`; all 1 if everything fits.

    `size`, [N], is descending, so the sequences whose chance is 1 come first.
    """
    if cost.sum() <= budget:
        return np.ones_like(cost)
    cost_before = np.cumsum(cost) - cost
    weight_from_here = np.cumsum((size * cost)[::-1])[::-1]
    factor = (budget - cost_before) / weight_from_here  # [N]: factor[i] holds if exactly the first i have chance 1
    first_below_one = np.argmax(factor * size <= 1)
    return np.minimum(1.0, factor[first_below_one] * size)


def capture_turns(tokens: int, ranks: int, window: int) -> int:
    """In how many batches a rank captures once: so many that its share of them, tokens / ranks of each, is a window."""
    return max(1, math.ceil(min(window, tokens) * ranks / max(1, tokens)))


def turn_budget(budget: int, turns: int, batch: int, rank: int) -> int:
    """Tokens that a rank captures of batch number `batch`: `budget` in one of `turns` batches, else none."""
    return budget if (batch + rank) % turns == 0 else 0


def choose_window(length: int, prompt_len: int, window: int, rng: random.Random) -> tuple[int, int]:
    """At most `window` neighbouring tokens of one sequence: (start, stop), 0 <= start < stop <= length.

    The start is the later of two uniform draws from the response, as late positions are those decoded in the tail.
    """
    last_start = max(0, length - window)
    first_start = min(prompt_len, last_start)
    start = max(rng.randint(first_start, last_start), rng.randint(first_start, last_start))
    return start, min(length, start + window)


# ---------------------------------------------------------------------- verifier weights

VERIFIER_PARTS = ("embed", "lm_head", "norm")
"""The policy's parts the drafter shares (`drafter.verifier.policy_part`)."""
PUT_S = 60.0
"""Most seconds to wait for the object store's copy of at most some GB, begun a rollout ago."""

Params = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Captured:
    """What this rank copied since the last `take`."""

    reference: ObjectRef | None = None
    """What `put` made of the `VerifierArrays`; None: nothing new was copied."""
    seconds: float = 0.0  # time that the weight sync, or the caller of `take`, waited for it
    errors: int = 0


class VerifierCapture:
    """One rank's copies, in `dtype`, of 16 bits, which `put` copies to the object store. Used by one thread at a time.

    `tied`: the policy's head is its embedding; `norm_offset` is added to the final norm's weight.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        put: Callable[[VerifierArrays], ObjectRef],
        tied: bool = False,
        norm_offset: float = 0.0,
    ) -> None:
        self._dtype = dtype
        self._put = put
        self._norm_offset = norm_offset
        self._wanted = [part for part in VERIFIER_PARTS if not (tied and part == "lm_head")]
        self._locked: dict[str, torch.Tensor] = {}  # kept for the run: locking pages takes longer than the copy
        self._host: dict[str, torch.Tensor] = {}  # the same, as tensors of the policy's shapes
        self._arrived: set[str] = set()
        self._failed = False  # copying from the present sync
        self._putting: Future[ObjectRef] | None = None
        self._thread = ThreadPoolExecutor(1, "tlt-verifier")
        self._seconds = 0.0
        self._errors = 0

    def tee(self, params: Params) -> Params:
        """Hand `params` on as they are; what the drafter shares is copied on the way."""
        for name, tensor in params:
            part = policy_part(name)
            if part is not None and part in self._wanted and not self._failed:
                with self._contained():
                    if part == "norm":
                        self._keep(part, tensor.float() + self._norm_offset)
                    else:
                        self._keep(part, tensor)
            yield name, tensor

    def finish(self) -> None:
        """Put what arrived into the object store, in the background; nothing where the sync brought none of it."""
        with self._contained():
            if self._arrived and not self._failed:
                missing = [part for part in self._wanted if part not in self._arrived]
                if missing:
                    raise RuntimeError(f"{' and '.join(missing)} did not arrive with the weight sync")
                arrays = {part: to_numpy16(self._host[part]) for part in self._arrived}
                arrays.setdefault("lm_head", arrays["embed"])  # tied: copied once, stored once
                self._putting = self._thread.submit(self._put, VerifierArrays(**arrays))
        self._failed = False
        self._arrived = set()

    def take(self) -> Captured:
        """What was copied since the last call."""
        reference: ObjectRef | None = None
        putting = self._putting
        self._putting = None
        with self._contained():
            reference = putting.result(PUT_S) if putting else None
        captured = Captured(reference, self._seconds, self._errors)
        self._failed = False
        self._seconds = 0.0
        self._errors = 0
        return captured

    def _keep(self, part: str, tensor: torch.Tensor) -> None:
        """Copy one tensor to the host in 16 bits, cast on its own device, so that half of its bytes cross."""
        if self._putting is not None:
            self._putting.result(PUT_S)  # nobody took the copy before this one: overwrite it once it is read
        short = tensor.detach().to(self._dtype)
        host = self._host.get(part)
        if host is None or host.shape != short.shape:
            self._locked[part] = page_locked(short.nbytes)
            host = self._host[part] = views(self._locked[part], [short])[0]
        host.copy_(short)
        self._arrived.add(part)

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Time the block; a failure ends the copying for this sync."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._failed = True
            self._putting = None
            self._errors += 1
            logger.warning("the policy's embedding, head and norm could not be copied for the drafter: %r", error)
        finally:
            self._seconds += time.perf_counter() - start
