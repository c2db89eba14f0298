"""The spot worker: a Ray actor beside one replica, around a `SpotLearner`.

It checks a flag between micro-batches, so that a stop costs at most one of them. Long work runs in a thread, so that
`stop` is answered at once. Every method returns a record of `messages` or raises; the trainer decides
what a failure means.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from verl_tlt.config import TLTConfig
from verl_tlt.errors import DrafterError
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import (
    AgreedParameters,
    BufferStats,
    Contribution,
    DrafterProvenance,
    HiddenStateShard,
    Merged,
    MergedSlice,
    Resumed,
    RolloutSampling,
    SessionResult,
    VerifierArrays,
)
from verl_tlt.spot_worker.host_memory import release_freed
from verl_tlt.spot_worker.merge_slices import join as join_slices
from verl_tlt.spot_worker.shards import join

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)


def _yield_to_engines() -> None:
    """Give this thread only the CPU time that nobody else wants."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


class SpotWorker:
    """Methods and arguments are those of `SpotLearner`; what differs is said here."""

    def __init__(
        self,
        name: str,
        config: TLTConfig,
        policy_dir: str,
        drafter: DrafterFile,
        sampling: RolloutSampling,
        device: str,
        agreed: AgreedParameters | None = None,
        published: DrafterFile | None = None,
    ) -> None:
        import torch

        from verl_tlt.spot_worker.learner import SpotLearner

        torch.set_num_threads(1)  # several processes share this machine's cores; spinning threads cost all of them
        self.learner = SpotLearner(name, config, policy_dir, drafter, sampling, device, agreed, published)
        self._stopping = threading.Event()
        # Without an accelerator training shares its cores with the engines that still decode.
        shared = not self.learner.place.is_borrowed and hasattr(os, "SCHED_IDLE")
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
        groups = [[shard for reference in ranks for shard in await reference] for ranks in shards]
        return await asyncio.to_thread(self._add, step, groups, verifier_weights)

    def _add(
        self, step: int, groups: list[list[HiddenStateShard]], verifier_weights: VerifierArrays | None
    ) -> BufferStats:
        joined = [join(shards) for shards in groups]
        sequences = [sequence for whole, _ in joined for sequence in whole]
        missing = sum(incomplete for _, incomplete in joined)
        if missing:
            total = missing + len(sequences)
            logger.warning("%d of %d sequences were left out: a rank's shard is missing", missing, total)
        return dataclasses.replace(self.learner.add(step, sequences, verifier_weights), incomplete=missing)

    async def warm_up(self) -> None:
        """Have the device ready for sessions, while it is nobody's."""
        await asyncio.to_thread(self.learner.warm_up)

    async def train(self) -> SessionResult:
        """Train until `stop`, or until the buffer's epochs are used up."""
        self._stopping.clear()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._session, self.learner.train, self._stopping.is_set)
        finally:
            self._session.submit(release_freed)  # nobody waits for it

    async def stop(self) -> None:
        """Ask a running session to end after its micro-batch; returns at once."""
        self._stopping.set()

    async def contribute(self) -> Contribution:
        """What this worker learned since its last merge."""
        return await asyncio.to_thread(self.learner.contribute)

    async def hand_in(self, slices: int) -> list[MergedSlice]:
        """The same for a merge over machines (`spot_worker.merge_slices`)."""
        return await asyncio.to_thread(self.learner.hand_in, slices)

    async def join(self, *parts: MergedSlice, last: bool) -> tuple[Merged, MergedSlice]:
        """Average one slice of several workers, which arrives through the object store: (facts without a delta, it)."""
        joined = await asyncio.to_thread(join_slices, parts, last=last)
        return joined.facts, joined

    async def adopt(self, *slices: MergedSlice) -> None:
        """Move to the new agreed version."""
        await asyncio.to_thread(self.learner.adopt_slices, slices)

    async def agreed(self) -> AgreedParameters:
        """Candidate, served and initial parameters, for a worker that joins."""
        return self.learner.agreed()

    async def propose(self) -> None:
        """The agreed version is about to be published."""
        self.learner.propose()

    async def keep(self, which: str) -> None:
        """What was proposed is published."""
        self.learner.keep(which)

    async def revert(self, which: str) -> None:
        """Go back to the served or the initial parameters."""
        await asyncio.to_thread(self.learner.revert, which)

    async def export(self, version: int, dtype: str, acceptance: list[float]) -> DrafterFile | None:
        """The agreed version as vLLM loads it; None: its numbers are not finite in that dtype."""
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
