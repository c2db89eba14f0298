"""Brings micro-batches to the training device, one ahead of the step that trains on them.

A micro-batch of a 7B policy is 117 MB of hidden states for 4096 rows. Packing it takes a good part of a training step,
and the device has nothing to do meanwhile; so a thread does it for the next micro-batch, into page-locked memory
(`pack`), from which it is copied on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TypeVar

import torch

from verl_tlt.drafter.data import Batch, check_tokens

ROW_BLOCK = 128
"""Rows of a CUDA batch are padded to a multiple of this: aligned for its kernels, which are then of few kinds."""
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class FedBatch:
    """A batch on the device, or on its way there."""

    batch: Batch
    """float32; without loss where the passes need a document's first rows (`Batch.for_passes`)."""
    tokens: int
    """Its rows with a loss, counted on the host."""
    copied: torch.cuda.Event | None
    """Reached when it has arrived; None: it has."""

    def arrived(self) -> Batch:
        """The batch, for kernels of the current stream, which wait for it; the host does not."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.batch.input_ids.device)
            stream.wait_event(self.copied)
            for f in fields(self.batch):
                getattr(self.batch, f.name).record_stream(stream)  # its memory is another stream's
        return self.batch


class Feed:
    """Sends packed batches to `device`, where `ttt_steps` passes are trained; from one thread at a time.

    A token outside the policy's `vocabulary` is a `DrafterError`.
    """

    def __init__(self, device: torch.device, ttt_steps: int, vocabulary: int) -> None:
        self._device, self._ttt_steps, self._vocabulary = device, ttt_steps, vocabulary
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch) -> FedBatch:
        """What is counted is counted on the host, before the batch leaves it."""
        check_tokens(batch.input_ids, self._vocabulary)
        batch = batch.for_passes(self._ttt_steps)
        tokens = batch.tokens
        if self._stream is None or any(getattr(batch, f.name).is_cuda for f in fields(batch)):
            there = batch.to(self._device, torch.float32)
            return FedBatch(there.padded(ROW_BLOCK) if self._stream else there, tokens, None)
        with torch.cuda.stream(self._stream):
            # What is page-locked already stays where it is. Torch keeps it for the next batch, and does not give it to
            # that one before this copy is done.
            locked = Batch(**{f.name: getattr(batch, f.name).pin_memory() for f in fields(batch)})
            there = locked.to(self._device, torch.float32).padded(ROW_BLOCK)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return FedBatch(there, tokens, copied)


@contextmanager
def ahead(items: Iterable[S], prepare: Callable[[S], T]) -> Iterator[Iterator[T]]:
    """The items, in their order, each prepared by a thread while the one before is used; one ahead and no more.

    What drawing or preparing an item raises is raised where that item would come. The thread has ended after the block,
    which waits for the item that it prepares at most.
    """
    source = iter(items)

    def following() -> tuple[T] | None:
        return next(((prepare(item),) for item in source), None)

    with ThreadPoolExecutor(1, "tlt-feed") as thread:  # it has the scheduling class of the thread that begins it

        def handed_out() -> Generator[T, None, None]:
            coming = thread.submit(following)
            while (ready := coming.result()) is not None:
                coming = thread.submit(following)
                yield ready[0]

        stream = handed_out()
        try:
            yield stream
        finally:
            stream.close()  # what was prepared and is not used lets go of its memory
