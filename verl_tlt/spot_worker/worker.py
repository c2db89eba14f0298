"""The spot worker: a Ray actor around a `SpotLearner`, on one device of one replica.

Long work runs in a thread, so that `stop` is answered at once. Methods raise what fails; the trainer decides what a
failure means. An error after which this process cannot use its device ends it (`spoils_device`).
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from verl_tlt.drafter import TrainingSequence, from_numpy16
from verl_tlt.errors import DrafterError
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import (
    BufferStats,
    HiddenStateShard,
    MergedSlice,
    MergeFacts,
    SessionResult,
    VerifierArrays,
)
from verl_tlt.spot_worker.merge import DrafterVersions, average_slice

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Environment variable: Ray leaves every device visible to every process."""
KEEP_TUNED = "TRITON_CACHE_AUTOTUNING"
"""Environment variable: Triton keeps on the node's disk which tile of a kernel is the fastest. Trying the 21 of each of
the loss's two kernels takes seconds, and a process that replaces another need not do it again."""

DEVICE_ERRORS = (torch.cuda.CudaError, torch.AcceleratorError)
"""Types of exceptions that tell of a device error, whatever their message."""
LIBRARY = re.compile(
    r"\b(CUDA|HIP|cuDNN|MIOpen|cuBLAS|cuSOLVER|cuSPARSE|cuFFT|NCCL|RCCL)( driver| runtime| unknown)? error\b"
    r"|\bTriton Error \[(CUDA|HIP)\]|\bdevice-side assert\b",
    re.IGNORECASE,
)
"""Beginnings of what torch, Triton and CUDA's libraries raise as a plain RuntimeError."""
MEMORY = re.compile(r"out of memory|_STATUS_ALLOC_FAILED|MemoryAllocation\b", re.IGNORECASE)
"""Words in what these libraries raise where memory is short: the process may go on."""


def _yield_to_engines() -> None:
    """Give this thread only the CPU time that no other wants."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def release_freed() -> None:
    """Return what a session freed to the system, for the actors' offloaded optimizers, where glibc can do so."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def spoils_device(error: BaseException) -> bool:
    """Whether this process cannot use its device any more: an error of CUDA, or of a library on it, other than one of
    memory that is short; also where it is the cause of `error`, or `error` was raised while it was handled.

    After a device assertion or an illegal access CUDA answers every further call of a process with the same error.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        from_library = isinstance(link, RuntimeError) and LIBRARY.search(str(link))
        if (from_library or isinstance(link, DEVICE_ERRORS)) and not MEMORY.search(str(link)):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


@contextmanager
def ending_with_its_device() -> Iterator[None]:
    """End this process, at once and without clean-up, where the block raises an error that `spoils_device`."""
    try:
        yield
    except Exception as error:
        if spoils_device(error):
            logger.critical("this spot worker can use its device no more, and ends so that another one can: %s", error)
            os._exit(1)  # what Python would clear away first is on the device, and may hang
        raise


async def _in_thread(function: Callable[..., T], *arguments: object, **named: object) -> T:
    with ending_with_its_device():
        return await asyncio.to_thread(function, *arguments, **named)


def _of_learner(method: str) -> Callable[..., Coroutine[object, object, object]]:
    async def call(self: SpotWorker, *arguments: object) -> object:
        return await _in_thread(getattr(self.learner, method), *arguments)

    return call


class SpotWorker:
    """Methods and arguments are those of `SpotLearner`; what differs is said here."""

    warm_up, hand_in, adopt = map(_of_learner, ("warm_up", "hand_in", "adopt"))
    revert, mark_exported, mark_published = map(_of_learner, ("revert", "mark_exported", "mark_published"))
    save, resume = map(_of_learner, ("save", "resume"))

    def __init__(self, *arguments: Any, **named: Any) -> None:
        if os.environ.get(NOSET):  # verl's actor takes its device by number; this would be its node's first one
            import ray

            if lent := ray.get_runtime_context().get_accelerator_ids().get("GPU"):
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(lent)
        os.environ.setdefault(KEEP_TUNED, "1")  # before the kernels are imported
        from verl_tlt.spot_worker.learner import SpotLearner

        torch.set_num_threads(1)  # several processes share this machine's cores; spinning threads cost all of them
        self.learner = SpotLearner(*arguments, **named)
        self._stopping = threading.Event()
        # Without an accelerator training shares its cores with the engines that still decode.
        shared = not self.learner.training_device.is_accelerator and hasattr(os, "SCHED_IDLE")
        self._session = ThreadPoolExecutor(1, "tlt-session", initializer=_yield_to_engines if shared else None)

    async def add(
        self,
        step: int,
        shards: Sequence[Sequence[ObjectRef]],
        verifier_weights: VerifierArrays | None,
        draft_ids: np.ndarray | None = None,
    ) -> BufferStats:
        """Take over what the tap captured: by group of actor ranks, from each rank a list of `HiddenStateShard`."""
        sequences, missing = [], 0
        for ranks in shards:
            arrived = [shard for reference in ranks for shard in await reference]
            whole, incomplete = await _in_thread(whole_sequences, arrived)
            sequences += whole
            missing += incomplete
        if missing:
            total = missing + len(sequences)
            logger.warning("%d of %d sequences were left out: a rank's shard is missing", missing, total)
        stats = await _in_thread(self.learner.add, step, sequences, verifier_weights, draft_ids)
        return dataclasses.replace(stats, incomplete=missing)

    async def train(self) -> SessionResult:
        self._stopping.clear()
        loop = asyncio.get_running_loop()
        try:
            with ending_with_its_device():
                return await loop.run_in_executor(self._session, self.learner.train, self._stopping.is_set)
        finally:
            self._session.submit(release_freed)  # is not waited for

    async def stop(self) -> None:
        """Ask a running session to end after its micro-batch; returns at once."""
        self._stopping.set()

    async def average(self, *parts: MergedSlice, last: bool) -> tuple[MergeFacts, MergedSlice]:
        average = await _in_thread(average_slice, parts, last=last)
        return average.facts, average

    async def versions(self) -> DrafterVersions:
        return self.learner.versions

    async def export(self, version: int, dtype: str, acceptance: list[float]) -> DrafterFile | None:
        """The candidate as vLLM loads it; None: its numbers are not finite in that dtype."""
        try:
            return await _in_thread(self.learner.export, version, dtype, acceptance)
        except DrafterError as error:
            logger.error("%s", error)
            return None

    async def steps(self) -> int:
        """Optimizer steps behind the worker's moments and learning rate."""
        return self.learner.trainer.steps


def whole_sequences(shards: Iterable[HiddenStateShard]) -> tuple[list[TrainingSequence], int]:
    """Whole sequences, in row order, out of what all ranks of one group sent; and how many lack a shard, left out."""
    rows: dict[int, list[HiddenStateShard]] = {}
    for shard in shards:
        rows.setdefault(shard.row, []).append(shard)
    sequences = [_whole_sequence(rows[row]) for row in sorted(rows)]
    whole = [sequence for sequence in sequences if sequence is not None]
    return whole, len(sequences) - len(whole)


def _whole_sequence(shards: list[HiddenStateShard]) -> TrainingSequence | None:
    """One sequence out of its shards; None where not every state of every token is there."""
    head = shards[0]
    length, hidden = len(head.tokens), head.states.shape[-1]
    states = np.empty((length, len(head.wanted), hidden), head.states.dtype)
    filled = np.zeros((length, len(head.wanted)), bool)
    for shard in shards:
        at = 0
        for begin, end in shard.stretches:
            for layer, inputs in zip(shard.layers, shard.states, strict=True):
                column = head.wanted.index(layer)
                states[begin:end, column] = inputs[at : at + end - begin]
                filled[begin:end, column] = True
            at += end - begin
    if not filled.all():
        return None
    wide = from_numpy16(states.reshape(length, -1))  # [L, 4H]
    return TrainingSequence(
        tokens=torch.from_numpy(head.tokens.copy()),  # the store's arrays are read-only
        prompt_len=head.prompt_len,
        aux=wide[:, :-hidden],
        last=wide[:, -hidden:],
        start=head.start,
        prompt=head.prompt,
    )
