"""The device that a learner trains on. An accelerator belongs to the actor and the engine: it is used in sessions only.

Both count on its memory outside a session (an engine maps fixed sizes as it wakes), and running out of memory there
ends the run. So a session begins with a check of the free memory, and leaves nothing on the device.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from verl_tlt.drafter import DeviceResidency, DrafterMemory, DrafterTrainer, session_bytes
from verl_tlt.drafter.memory import page_locked, views
from verl_tlt.errors import TLTError

logger = logging.getLogger(__name__)

MARGIN = 0.03
"""Share of the device's memory that a session leaves free, since contexts and pools of actor and engine grow."""
FEWEST_ROWS = 256
"""Fewest rows of a micro-batch: with fewer, a step's fixed costs would take most of its time."""
GIB = 2**30


def check_room(needed: int, free: int, total: int) -> None:
    """Raise a `TLTError` where a session that takes `needed` bytes does not fit into a device's free memory."""
    if needed > free - MARGIN * total:
        raise TLTError(
            f"a session needs {needed / GIB:.1f} GiB of device memory, and {free / GIB:.1f} of {total / GIB:.1f} GiB "
            "are free: lower tlt.drafter.batch_tokens or have the actor offload its parameters and optimizer."
        )


class TrainingDevice:
    """Where a learner trains; `name` as torch has it, "cuda" or "cpu"."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_accelerator = self.device.type != "cpu"
        self._memory: DrafterMemory | None = None
        self._held = torch.empty(0, dtype=torch.uint8)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of an accelerator."""
        return torch.cuda.mem_get_info(self.device)

    def receive(self, trainer: DrafterTrainer) -> None:
        """Make the host memory that sessions copy from and to: seconds for a large drafter, and none may wait."""
        if self.is_accelerator:
            self._memory = DrafterMemory(trainer)

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Page-locked host copy of a tensor, which an accelerator reads at full speed; in the previous one's memory."""
        if not self.is_accelerator:
            return tensor
        if len(self._held) != tensor.nbytes:
            self._held = page_locked(tensor.nbytes)
        return views(self._held, [tensor])[0].copy_(tensor)

    def rows(self, trainer: DrafterTrainer, most: int, scored: int) -> int:
        """Rows of a session's micro-batches: `most`, or half of it, or a quarter and so on, as memory is free.

        `scored` are those of the largest batch that is scored.
        """
        if not self.is_accelerator:
            return most
        free, total = self.memory()
        rows = most
        while rows >= 2 * FEWEST_ROWS and self._needed(trainer, rows, scored) > free - MARGIN * total:
            rows //= 2
        if rows < most:
            logger.warning("%.1f GiB of device memory are free: batches have %d rows, not %d", free / GIB, rows, most)
        return rows

    def _needed(self, trainer: DrafterTrainer, rows: int, scored: int) -> int:
        return session_bytes(trainer.model, rows, trainer.ttt_steps, scored)

    def resident(
        self, trainer: DrafterTrainer, rows: int, scored: int = 0, *, trains: bool = True
    ) -> AbstractContextManager[None]:
        """The drafter on the device inside the block, and off it afterwards; a `TLTError` where it does not fit.

        `rows` are those of the largest batch that is trained, `scored` of the largest that is scored; unless it
        `trains` there, nothing has to come back.
        """
        if not self.is_accelerator:
            return nullcontext()
        check_room(self._needed(trainer, rows, scored), *self.memory())
        if self._memory is None:
            self.receive(trainer)
        assert self._memory is not None
        return self._resident(self._memory, trains)

    def _resident(self, memory: DrafterMemory, trains: bool) -> AbstractContextManager[None]:
        return DeviceResidency(memory, self.device, trains=trains)
