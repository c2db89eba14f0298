"""The spot worker: a Ray actor beside one replica, around a `SpotLearner`.

It checks a flag between micro-batches, so that a stop costs at most one of them. Long work runs in a thread, so that
`stop` is answered at once. Every method returns plain data or raises; the trainer decides what a failure means.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verl_tlt.config import TLTConfig
from verl_tlt.messages import DrafterFile, HiddenStateShard
from verl_tlt.spot_worker.merge import Contribution, Merged, merge
from verl_tlt.spot_worker.shards import join

if TYPE_CHECKING:
    from verl_tlt.spot_worker.learner import Params

logger = logging.getLogger(__name__)


def _yield_to_engines() -> None:
    """Give this thread only the CPU time that nobody else wants."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


class SpotWorker:
    """Methods are those of `SpotLearner`; what differs is said here.

    Args:
        name: of the replica it belongs to.
        config: `TLTConfig.to_dict()`.
        arguments: the others of `SpotLearner`.
    """

    def __init__(self, name: str, config: dict[str, Any], **arguments: Any) -> None:
        import torch

        from verl_tlt.spot_worker.learner import SpotLearner

        torch.set_num_threads(1)  # several processes share this machine's cores; spinning threads cost all of them
        self.learner = SpotLearner(name, TLTConfig.from_dict(config), **arguments)
        self._stopping = threading.Event()
        # Without an accelerator training shares its cores with the engines that still decode.
        shared = self.learner.device.type == "cpu" and hasattr(os, "SCHED_IDLE")
        self._session = ThreadPoolExecutor(1, "tlt-session", initializer=_yield_to_engines if shared else None)

    async def add(self, step: int, sequences: list[list[Any]], verifier_weights: list[Any]) -> dict[str, Any]:
        """Take over what the tap captured in one step.

        Args:
            step: the RL step.
            sequences: for each group of actor ranks that computed the same sequences, an ObjectRef from each of its
                ranks, of a list of `HiddenStateShard`.
            verifier_weights: an ObjectRef of the policy's verifier weights, or nothing where they are as before.

        Returns:
            Buffer statistics: {"tokens", "bytes", "sequences", ...}, and {"incomplete": sequences left out}.
        """
        groups = [[await reference for reference in ranks] for ranks in sequences]
        parts = await verifier_weights[0] if verifier_weights else None
        return await asyncio.to_thread(self._add, step, groups, parts)

    def _add(
        self, step: int, groups: list[list[list[HiddenStateShard]]], parts: dict[str, Any] | None
    ) -> dict[str, Any]:
        layers = self.learner.model.config.eagle_aux_hidden_state_layer_ids
        items, missing = [], 0
        for ranks in groups:
            joined, incomplete = join(ranks, layers)
            items += joined
            missing += incomplete
        if missing:
            logger.warning("%d of %d sequences were left out: a rank's part is missing", missing, missing + len(items))
        return self.learner.add(step, items, parts) | {"incomplete": missing}

    async def train(self) -> dict[str, Any]:
        """Train until `stop`, or until the buffer's epochs are used up. Returns a `SessionResult` as a dict."""
        self._stopping.clear()
        loop = asyncio.get_running_loop()
        return asdict(await loop.run_in_executor(self._session, self.learner.train, self._stopping.is_set))

    async def stop(self) -> float:
        """Ask a running session to end after its micro-batch; returns at once with the worker's unix time."""
        self._stopping.set()
        return time.time()

    async def contribute(self) -> Contribution:
        """What this worker learned since its last merge."""
        return await asyncio.to_thread(self.learner.contribute)

    async def merge(self, *contributions: Contribution) -> Merged:
        """Average several workers' deltas by tokens (runs on one worker; they arrive through the object store)."""
        return await asyncio.to_thread(merge, contributions, min_steps=self.learner.config.spot.min_merge_steps)

    async def adopt(self, merged: Merged) -> None:
        """Move to the new agreed version."""
        await asyncio.to_thread(self.learner.adopt, merged)

    async def agreed(self) -> dict[str, Params]:
        """Candidate, served and initial parameters, for a worker that joins."""
        return self.learner.agreed()

    async def keep(self, which: str) -> None:
        """The agreed version is published."""
        self.learner.keep(which)

    async def revert(self, which: str) -> None:
        """Go back to the served or the initial parameters."""
        await asyncio.to_thread(self.learner.revert, which)

    async def score(self, max_draft: int) -> dict[str, Any]:
        """Score candidate, served and initial on this node's held-out sequences."""
        return await asyncio.to_thread(self.learner.score, max_draft)

    async def export(self, version: int, dtype: str, acceptance: list[float]) -> DrafterFile:
        """The agreed version as vLLM loads it."""
        return await asyncio.to_thread(self.learner.export, version, dtype, acceptance)

    async def save(self, directory: str, provenance: dict[str, Any]) -> str:
        """Write the served drafter and the training state atomically under `directory`; returns it."""
        return await asyncio.to_thread(self.learner.save, directory, provenance)

    async def resume(self, directory: str) -> bool:
        """Continue from a checkpoint; False where it holds none."""
        return await asyncio.to_thread(self.learner.resume, directory)
