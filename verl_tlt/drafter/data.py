"""Training data of the drafter: what the policy computed for a text, aligned as vLLM feeds a drafter, packed, and fed.

At step t vLLM feeds the drafter token x_{t+1} with the policy's hidden state g_t at position t, and asks for the
distribution of x_{t+2}, which the policy answers from y_{t+1} (`SpecDecodeBaseProposer.set_inputs_first_pass`). A row
of a batch is exactly that triple. A sequence of L tokens makes L - 1 rows. A thread packs the next micro-batch while
the device works on one (a 7B policy's is 117 MB for 4096 rows).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from verl_tlt.errors import DrafterError

PADDING = -1
"""Document id of rows that hold nothing: no other row attends to them, and they carry no loss."""
ROW_BLOCK = 128
"""Rows of a CUDA batch are padded to a multiple of this: aligned for its kernels, which are then of few kinds."""
S = TypeVar("S")
T = TypeVar("T")


def to_numpy16(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` on the host in 16 bits, same shape: float16 as it is, others as bfloat16 bits in uint16."""
    if tensor.dtype == torch.float16:
        return tensor.detach().cpu().contiguous().numpy()
    return tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint16).numpy()


def from_numpy16(array: np.ndarray) -> torch.Tensor:
    """The tensor behind `to_numpy16`: uint16 as bfloat16 bits, floats as they are. A read-only array is copied."""
    if not array.flags.writeable:  # arrays out of Ray's store are; torch has no read-only tensors
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


@dataclass(frozen=True, eq=False)
class TrainingSequence:
    """A prompt with its response, or a window of it from position `start` on, with the policy's hidden states."""

    tokens: torch.Tensor  # int64 [L]
    prompt_len: int  # tokens of the window that belong to the prompt: `tokens[prompt_len:]` is response
    aux: torch.Tensor
    """[L, 3H], any float (16 bits in buffers): the aux layers' inputs at t, side by side, in ascending layer order;
    [L, 0] for a policy's MTP head, which reads `last` alone."""
    last: torch.Tensor
    """[L, H], any float: the last layer's output at t *before* the final norm; it predicts token t+1."""
    start: int = 0  # position of `tokens[0]` in the whole sequence
    prompt: int | None = None
    """Number shared by all responses to one prompt, which are trained on or held out together; None: the only one."""
    foreign: tuple[tuple[int, int], ...] = ()
    """Stretches [begin, end) of the response that the policy did not sample, such as a tool's answer, ascending."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        aux, last = len(self.aux), len(self.last)
        if aux != length or last != length:
            raise DrafterError(f"A sequence of {length} tokens came with {aux} aux and {last} last states.")
        if not 0 <= self.prompt_len <= length:
            raise DrafterError(f"prompt_len={self.prompt_len} must be 0..{length}, the tokens of the sequence.")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        return len(self.tokens) - 1

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.aux.nbytes + self.last.nbytes

    @property
    def turns(self) -> list[range]:
        """Stretches of tokens that the policy sampled, ascending: the response without its foreign stretches."""
        turns = []
        begin = self.prompt_len
        for foreign_begin, foreign_end in self.foreign:
            turns.append(range(begin, foreign_begin))
            begin = foreign_end
        turns.append(range(begin, len(self)))
        return [turn for turn in turns if turn]

    def loss_rows(self, draft: int = 1) -> list[range]:
        """Rows with a loss, turn by turn: the policy sampled their input and the `draft` tokens after it."""
        rows = [range(max(turn.start - 1, 0), turn.stop - 1 - draft) for turn in self.turns]
        return [stretch for stretch in rows if stretch]

    def positions(self, draft: int) -> int:
        """Number of places where a draft of `draft` tokens can start, all of which the policy sampled."""
        return sum(map(len, self.loss_rows(draft)))

    def window(self, begin: int, end: int) -> TrainingSequence:
        """Tokens `begin:end` at their true positions; views, no copies."""
        tokens = self.tokens[begin:end]
        return replace(
            self,
            tokens=tokens,
            aux=self.aux[begin:end],
            last=self.last[begin:end],
            prompt_len=min(max(self.prompt_len - begin, 0), len(tokens)),
            start=self.start + begin,
            foreign=within(self.foreign, begin, begin + len(tokens)),
        )


def within(stretches: Iterable[tuple[int, int]], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """The parts of stretches that lie in `begin:end`, counted from `begin`."""
    cut = ((max(a, begin) - begin, min(b, end) - begin) for a, b in stretches)
    return tuple((a, b) for a, b in cut if a < b)


@dataclass(frozen=True)
class Batch:
    """Sequences (documents) side by side in one row of S positions; attention stays within a document."""

    input_ids: torch.Tensor  # int64 [1, S]: x_{t+1}
    hidden_states: torch.Tensor
    """float [1, S, 3H]: g_t, the aux layers' inputs; [1, S, H] for an MTP head: y_t before the final norm."""
    last_hidden: torch.Tensor
    """float [1, S, H]: y_{t+1} before the final norm; through norm and head it is the teacher of this row."""
    next_ids: torch.Tensor
    """int64 [1, S]: x_{t+2}, the token the rollout sampled where this row drafts; 0 past the end."""
    loss_mask: torch.Tensor  # bool [1, S]: the policy sampled the row's input and its next token
    position_ids: torch.Tensor  # int64 [1, S]: t, as vLLM counts (RoPE is relative, so only differences matter)
    document_ids: torch.Tensor  # int64 [1, S]: which sequence, from 0; -1 is padding

    @property
    def rows(self) -> int:
        """Positions S, padding included: what a step costs."""
        return self.input_ids.shape[1]

    @property
    def tokens(self) -> int:
        """Rows with a loss: what a step learns from."""
        return int(self.loss_mask.sum())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """The batch on `device`, hidden states cast to `dtype`."""
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()}
        for name in ("hidden_states", "last_hidden"):
            moved[name] = moved[name].to(dtype)
        return Batch(**moved)

    def padded(self, multiple: int) -> Batch:
        """The batch, filled up with padding rows to a multiple of `multiple`."""
        if not (missing := -self.rows % multiple):
            return self
        grown = {}
        for name, tensor in vars(self).items():
            shape = (1, missing, *tensor.shape[2:])
            fill = tensor.new_full(shape, PADDING if name == "document_ids" else 0)
            grown[name] = torch.cat([tensor, fill], dim=1)
        return Batch(**grown)

    def for_passes(self, ttt_steps: int) -> Batch:
        """The batch without loss on the first `ttt_steps - 1` rows of each document, which makes packing exact.

        Pass k is scored k rows on: those rows would be scored against passes that began in another document.
        """
        ids = self.document_ids[0]  # [S]
        index = torch.arange(self.rows, device=ids.device)
        new = torch.ones_like(ids, dtype=torch.bool)
        new[1:] = ids[1:] != ids[:-1]
        first = torch.where(new, index, 0).cummax(0).values  # [S] first row of each row's document
        return replace(self, loss_mask=self.loss_mask & (index - first >= ttt_steps - 1))


def check_tokens(tokens: torch.Tensor, vocabulary: int) -> None:
    """Raise a `DrafterError` where a token id is outside 0..`vocabulary` - 1: a GPU would end in a device assertion."""
    ids = tokens.cpu().numpy()  # where they are as a rule: nothing waits for a device
    for wrong in (ids.min(initial=0), ids.max(initial=0)):
        if not 0 <= wrong < vocabulary:
            raise DrafterError(f"Token {wrong} is outside the policy's vocabulary, 0..{vocabulary - 1}.")


def align(sequence: TrainingSequence) -> Batch:
    """The rows of one sequence of at least two tokens, as a batch of its own (S = L - 1)."""
    rows = sequence.rows
    if rows < 1:
        raise DrafterError(f"A sequence of {len(sequence)} tokens has nothing to draft; at least 2 are needed.")
    tokens = sequence.tokens
    hidden = sequence.aux if sequence.aux.shape[1] else sequence.last  # an MTP head has no aux layers
    loss_mask = torch.zeros(1, rows, dtype=torch.bool)
    for stretch in sequence.loss_rows():
        loss_mask[:, stretch.start : stretch.stop] = True
    return Batch(
        input_ids=tokens[1:][None],
        hidden_states=hidden[:-1][None],
        last_hidden=sequence.last[1:][None],
        next_ids=torch.cat([tokens[2:], tokens.new_zeros(1)])[None],
        loss_mask=loss_mask,
        position_ids=torch.arange(sequence.start, sequence.start + rows)[None],
        document_ids=torch.zeros(1, rows, dtype=torch.int64),
    )


def pack(sequences: Iterable[TrainingSequence], *, pinned: bool = False) -> Batch:
    """One batch of whole sequences, at least one; `pinned`: in page-locked memory, which CUDA copies by itself."""
    parts = [align(sequence) for sequence in sequences]
    if not parts:
        raise DrafterError("There is no sequence to pack.")
    for number, part in enumerate(parts):
        part.document_ids.fill_(number)
    rows = sum(part.rows for part in parts)
    joined = {}
    for name, tensor in vars(parts[0]).items():
        place = torch.empty((1, rows, *tensor.shape[2:]), dtype=tensor.dtype, device=tensor.device, pin_memory=pinned)
        joined[name] = torch.cat([getattr(part, name) for part in parts], dim=1, out=place)
    return Batch(**joined)


def batches(sequences: Iterable[TrainingSequence], budget: int) -> Iterator[Batch]:
    """Packed batches of at most `budget` rows, in the given order; a shuffled endless stream works as well."""
    pieces = (piece for sequence in sequences for piece in windows(sequence, budget))
    for group in grouped(pieces, lambda piece: piece.rows, budget):
        yield pack(group)


def windows(sequence: TrainingSequence, budget: int) -> list[TrainingSequence]:
    """The sequence in the fewest windows of at most `budget` rows, of about equal length; each row is in one."""
    return [sequence.window(begin, end) for begin, end in window_bounds(len(sequence), budget)]


def window_bounds(length: int, budget: int) -> list[tuple[int, int]]:
    """(begin, end) in tokens of the `windows` of a sequence of `length` tokens; neighbours share one token."""
    if budget < 1:
        raise DrafterError(f"budget={budget} must be at least 1, the rows of a batch.")
    rows = length - 1
    count = math.ceil(rows / budget)
    if count <= 0:
        return []
    cuts = [rows * k // count for k in range(count + 1)]
    return [(begin, end + 1) for begin, end in pairwise(cuts)]


def grouped(
    items: Iterable[T], size: Callable[[T], int], budget: int, *, open_groups: int = 1, padded: bool = False
) -> Iterator[list[T]]:
    """Fill groups of at most `budget` with items: each goes into the first open group that has room (first fit).

    Groups come in the order in which they were begun; `items` may be endless. An item above the budget gets a group of
    its own. `open_groups` is how many groups stay open: 1 keeps the items' order, 32 fills nearly every group. With
    `padded` the items of a group are padded to one length: it costs the longest one times their number.
    """
    begun: deque[tuple[list[T], list[int]]] = deque()
    for item in items:
        length = size(item)
        for group, sizes in begun:
            cost = max(length, *sizes) * (len(sizes) + 1) if padded else sum(sizes) + length
            if cost <= budget:
                group.append(item)
                sizes.append(length)
                break
        else:
            if len(begun) == open_groups:
                yield begun.popleft()[0]
            begun.append(([item], [length]))
    yield from (group for group, _ in begun)


@dataclass(frozen=True)
class FedBatch:
    """A batch on the device, or on its way there."""

    batch: Batch  # float32; without loss where the passes need a document's first rows (`Batch.for_passes`)
    tokens: int  # its rows with a loss, counted on the host
    copied: torch.cuda.Event | None  # reached when it has arrived; None: it has

    def arrived(self) -> Batch:
        """The batch, for kernels of the current stream, which wait for it; the host does not."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.batch.input_ids.device)
            stream.wait_event(self.copied)
            for tensor in vars(self.batch).values():
                tensor.record_stream(stream)  # its memory is another stream's
        return self.batch


def feed_to(device: torch.device, ttt_steps: int, vocabulary: int) -> Callable[[Batch], FedBatch]:
    """Sends packed batches to `device`, for `ttt_steps` passes; a token outside `vocabulary` is a `DrafterError`."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(batch: Batch) -> FedBatch:
        check_tokens(batch.input_ids, vocabulary)
        batch = batch.for_passes(ttt_steps)
        tokens = batch.tokens
        if stream is None or any(tensor.is_cuda for tensor in vars(batch).values()):
            moved = batch.to(device, torch.float32)
            return FedBatch(moved.padded(ROW_BLOCK) if stream else moved, tokens, None)
        with torch.cuda.stream(stream):
            # What is page-locked already stays where it is. Torch gives it to no other batch before this copy is done.
            locked = Batch(**{name: tensor.pin_memory() for name, tensor in vars(batch).items()})
            moved = locked.to(device, torch.float32).padded(ROW_BLOCK)
            return FedBatch(moved, tokens, stream.record_event())

    return send


@contextmanager
def ahead(items: Iterable[S], prepare: Callable[[S], T]) -> Iterator[Iterator[T]]:
    """The items, each prepared by a thread while the one before is used.

    An error of `items` or `prepare` is raised where the item would have come.
    """
    source = iter(items)

    def prepare_next() -> tuple[T] | None:
        """The next item, in a tuple, since it may be None itself; None: there is no further item."""
        for item in source:
            return (prepare(item),)
        return None

    with ThreadPoolExecutor(1, "tlt-feed") as thread:  # it has the scheduling class of the thread that begins it

        def handed_out() -> Generator[T, None, None]:
            coming = thread.submit(prepare_next)
            while (ready := coming.result()) is not None:
                coming = thread.submit(prepare_next)
                yield ready[0]

        stream = handed_out()
        try:
            yield stream
        finally:
            stream.close()  # what was prepared and is not used lets go of its memory
