"""Runs `SpotTrainer` in a Ray actor.

All work runs in one thread, in the order of the calls; `stop` takes effect at once. Methods raise what fails, and the
RL trainer then replaces this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from verl_tlt.logs import log_to_stderr
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import (
    BufferStats,
    DrafterProvenance,
    HiddenStateShard,
    SessionResult,
    SpotPlan,
    VerifierArrays,
)
from verl_tlt.spot_trainer.sequences import whole_sequences
from verl_tlt.spot_trainer.trainer import SpotTrainer

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SpotTrainerWorker:
    """Arguments are those of `SpotTrainer`; `environment` says which accelerators this process sees."""

    def __init__(
        self,
        plan: SpotPlan,
        environment: Mapping[str, str],
        published: DrafterFile | None = None,
        draft_ids: np.ndarray | None = None,
        device_module: Callable[[], Any] | None = None,
    ) -> None:
        """`device_module`: verl's, where a device is something else than a GPU: the core of a replica."""
        log_to_stderr()
        os.environ.update(environment)
        # Triton keeps on the disk which tiles of a kernel are the fastest. Trying the 21 of each of the loss's two
        # kernels takes seconds, and a process that replaces this one need not do it again.
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
        torch.set_num_threads(1)  # on a CPU the engines that still decode have the other cores
        self._stopped = 0  # number of the last session that was told to stop
        self._incomplete_logged = False
        on_cpu = plan.device == "cpu" and hasattr(os, "SCHED_IDLE")
        self._thread = ThreadPoolExecutor(1, "tlt-spot", initializer=_yield_to_engines if on_cpu else None)
        self.trainer = SpotTrainer(plan, published, draft_ids)
        self._devices = device_module() if device_module is not None else None

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def pid(self) -> int:
        """Return the number of this process; it is answered once the drafter is loaded."""
        return os.getpid()

    async def rehearse(self) -> None:
        await self._run(self.trainer.rehearse)

    async def add(
        self,
        step: int,
        groups: Sequence[Sequence[ObjectRef]],
        verifier_weights: VerifierArrays | None,
        draft_ids: np.ndarray | None,
    ) -> BufferStats:
        """Take over what was captured: by group of actor ranks, from each rank a list of `HiddenStateShard`."""
        sequences = []
        missing = 0
        for ranks in groups:
            shards: list[HiddenStateShard] = [shard for reference in ranks for shard in await reference]
            whole, incomplete = await self._run(whole_sequences, shards)
            sequences += whole
            missing += incomplete
        if missing and not self._incomplete_logged:
            self._incomplete_logged = True
            logger.warning("%d sequences lack a rank's part and were left out; more are only counted.", missing)
        stats = await self._run(self.trainer.add, step, sequences, verifier_weights, draft_ids)
        return replace(stats, incomplete=missing)

    def _train(self, device: int, should_stop: Callable[[], bool]) -> SessionResult:
        devices = self._devices
        on_device = contextlib.nullcontext()
        # Without verl's CPU platform, as in tests, there is no such device.
        if devices and devices.is_available():
            on_device = devices.device(device)
        with on_device:
            return self.trainer.train(device, should_stop)

    async def train(self, session: int, device: int) -> SessionResult:
        """Train until `stop` is called for this `session`, a number above those before it."""
        try:
            return await self._run(self._train, device, lambda: self._stopped >= session)
        finally:
            self._thread.submit(_release_freed)  # is not waited for

    async def stop(self, session: int) -> None:
        """Ask a session to end after its micro-batch; returns at once. The call may arrive before `train`."""
        self._stopped = max(self._stopped, session)

    async def export(self) -> tuple[DrafterFile | None, DrafterFile | None]:
        """The drafter to publish, without its weights and with them; None twice where it was given up.

        The weights go from here to the rollout servers through the object store, past the RL trainer.
        """
        drafter = await self._run(self.trainer.export)
        if drafter is None:
            return None, None
        return replace(drafter, weights=b""), drafter

    async def save(self, directory: str, provenance: DrafterProvenance, step: str | None, rotates: bool) -> None:
        await self._run(self.trainer.save, directory, provenance, step, rotates)


def _yield_to_engines() -> None:
    """Give this thread only the CPU time that no other wants."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def _release_freed() -> None:
    """Return what a session freed to the system, for the actors' offloaded optimizers, where glibc can do so."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
