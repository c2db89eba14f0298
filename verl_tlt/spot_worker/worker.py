"""The spot worker: a Ray actor around a `SpotLearner`, on one device of one replica.

Long work runs in a thread, so that `stop` is answered at once. Methods raise what fails; the trainer decides what a
failure means.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from verl_tlt.errors import DrafterError
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import (
    BufferStats,
    DrafterProvenance,
    MergedSlice,
    MergeFacts,
    Resumed,
    SessionResult,
    VerifierArrays,
)
from verl_tlt.spot_worker.merge import average_slice
from verl_tlt.spot_worker.shards import whole_sequences

if TYPE_CHECKING:
    from ray import ObjectRef

    from verl_tlt.spot_worker.versions import DrafterVersions

logger = logging.getLogger(__name__)


def _yield_to_engines() -> None:
    """Give this thread only the CPU time that no other wants."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def release_freed() -> None:
    """Return what a session freed to the system, for the actors' offloaded optimizers and checkpoints: glibc's
    `malloc_trim`; nothing happens with another C library.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class SpotWorker:
    """Methods and arguments are those of `SpotLearner`; what differs is said here."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        import torch

        from verl_tlt.spot_worker.learner import SpotLearner

        torch.set_num_threads(1)  # several processes share this machine's cores; spinning threads cost all of them
        self.learner = SpotLearner(*arguments, **named)
        self._stopping = threading.Event()
        # Without an accelerator training shares its cores with the engines that still decode.
        shared = not self.learner.training_device.is_accelerator and hasattr(os, "SCHED_IDLE")
        self._session = ThreadPoolExecutor(1, "tlt-session", initializer=_yield_to_engines if shared else None)

    async def add(
        self, step: int, shards: Sequence[Sequence[ObjectRef]], verifier_weights: VerifierArrays | None
    ) -> BufferStats:
        """Take over what the tap captured in one step.

        Args:
            step: the RL step.
            shards: for each group of actor ranks that computed the same sequences, an ObjectRef from each of its ranks,
                of a list of `HiddenStateShard`.
            verifier_weights: the policy's; None: as they were.
        """
        found = []
        for ranks in shards:
            held = [shard for reference in ranks for shard in await reference]
            found.append(await asyncio.to_thread(whole_sequences, held))
        sequences = [sequence for whole, _ in found for sequence in whole]
        missing = sum(incomplete for _, incomplete in found)
        if missing:
            total = missing + len(sequences)
            logger.warning("%d of %d sequences were left out: a rank's shard is missing", missing, total)
        stats = await asyncio.to_thread(self.learner.add, step, sequences, verifier_weights)
        return dataclasses.replace(stats, incomplete=missing)

    async def warm_up(self) -> None:
        """Run what a session runs once, while no engine or actor uses the device."""
        await asyncio.to_thread(self.learner.warm_up)

    async def train(self) -> SessionResult:
        """Train until `stop`, or until the buffer's epochs are used up."""
        self._stopping.clear()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._session, self.learner.train, self._stopping.is_set)
        finally:
            self._session.submit(release_freed)  # is not waited for

    async def stop(self) -> None:
        """Ask a running session to end after its micro-batch; returns at once."""
        self._stopping.set()

    async def hand_in(self, slices: int) -> list[MergedSlice]:
        """What this worker learned since its last merge."""
        return await asyncio.to_thread(self.learner.hand_in, slices)

    async def average(self, *parts: MergedSlice, last: bool) -> tuple[MergeFacts, MergedSlice]:
        """Average one slice of several workers, which arrives through the object store: (its facts, it)."""
        average = await asyncio.to_thread(average_slice, parts, last=last)
        return average.facts, average

    async def adopt(self, *slices: MergedSlice) -> None:
        """Move to the new candidate."""
        await asyncio.to_thread(self.learner.adopt, slices)

    async def versions(self) -> DrafterVersions:
        """What all spot workers hold alike, for one that joins them."""
        return self.learner.versions

    async def mark_exported(self) -> None:
        """The candidate is about to be published."""
        self.learner.mark_exported()

    async def mark_published(self) -> None:
        """What was exported is published."""
        self.learner.mark_published()

    async def revert(self, which: Literal["served", "initial"]) -> None:
        """Go back to the served or the initial parameters."""
        await asyncio.to_thread(self.learner.revert, which)

    async def export(self, version: int, dtype: str, acceptance: list[float]) -> DrafterFile | None:
        """The candidate as vLLM loads it; None: its numbers are not finite in that dtype."""
        try:
            return await asyncio.to_thread(self.learner.export, version, dtype, acceptance)
        except DrafterError as error:
            logger.error("%s", error)
            return None

    async def save(self, directory: str, provenance: DrafterProvenance) -> None:
        """Write the served drafter and the training state atomically under `directory`."""
        await asyncio.to_thread(self.learner.save, directory, provenance)

    async def resume(self, directory: str) -> Resumed | None:
        """Continue from a checkpoint; None where it holds none."""
        return await asyncio.to_thread(self.learner.resume, directory)
