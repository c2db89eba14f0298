"""Where a drafter is while it trains: on the training device for a session, on the host between two of them.

RL waits for the end of a session, so only what training has changed is copied back: the trained weights and AdamW's two
moments, into pinned memory where CUDA copies. The policy's embedding, head and norm go there in 16 bits and are
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

    from verl_tlt.drafter.train import DrafterTrainer

FROZEN = torch.bfloat16
"""What frozen weights become on the device: the dtype that matrix products there have anyway (`mixed_precision`)."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's; it keeps its step count on the host."""


def session_bytes(model: Eagle3DraftModel, rows: int, passes: int) -> int:
    """Device memory of a session at its peak, in bytes, by rule of thumb: 10 GB for a 7B policy at 1024 rows.

    `rows`: of the largest batch that is trained or scored; `passes`: of the training-time test.
    """
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() * FROZEN.itemsize for p in model.parameters() if not p.requires_grad)
    buffers = sum(b.nbytes for b in model.buffers())
    weights = (1 + len(MOMENTS) + 1) * trained + frozen + buffers  # and gradients; a second set of weights in scoring
    # Logits and their gradients in 16 bits for each pass; or five float32 values for each logit (`acceptance`).
    return weights + rows * model.draft_vocab_size * max(20, 8 + 4 * passes)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class DeviceResidency:
    """Keeps a drafter and its optimizer on a device for the length of a `with` block.

    Afterwards they are on the host again, whatever failed, and the device is as empty as before.

    `trains`: whether weights and moments may change there; they are not copied back otherwise.
    """

    def __init__(self, trainer: DrafterTrainer, device: torch.device, *, trains: bool = True) -> None:
        self._device, self._trains = device, trains
        self._state: Mapping[torch.Tensor, dict[str, torch.Tensor]] = trainer.optimizer.state
        everything = [*trainer.model.parameters(), *trainer.model.buffers()]
        self._trained = [(p, _pinned(p.data)) for p in trainer.parameters.values()]
        self._frozen = [(t, t.data) for t in everything if not t.requires_grad]
        # Host memory of moments is made now, also for those that do not exist yet: later a stop would wait for it.
        self._moments = [
            (p, key, _pinned(self._state[p][key] if p in self._state else torch.zeros_like(p)))
            for p, _ in (self._trained if trains else [])
            for key in MOMENTS
        ]

    def __enter__(self) -> None:
        """Copy all that a session needs to the device."""
        try:
            for tensor, host in self._trained + self._frozen:
                halved = not tensor.requires_grad and isinstance(tensor, torch.nn.Parameter)
                tensor.data = self._on_device(host, FROZEN if halved else host.dtype)
            for parameter, key, host in self._moments:
                if parameter in self._state:
                    self._state[parameter][key] = self._on_device(host, host.dtype)
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *_: object) -> None:
        """Copy back what training has changed, and give up the device's memory."""
        try:
            if self._trains:
                for parameter, host in self._trained:
                    _copy(host, parameter.data)
                for parameter, key, host in self._moments:
                    if parameter in self._state:
                        _copy(host, self._state[parameter][key])
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
        finally:
            self._leave()

    def _on_device(self, host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        target = torch.empty_like(host, dtype=dtype, device=self._device)
        _copy(target, host)
        return target

    def _leave(self) -> None:
        for tensor, host in self._trained + self._frozen:
            tensor.grad = None
            tensor.data = host
        for parameter, key, host in self._moments:
            if parameter in self._state:
                self._state[parameter][key] = host
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the engine maps fixed sizes when it wakes: it needs all of the memory


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that CUDA copies from and to at full speed, where there is CUDA."""
    return tensor.pin_memory() if torch.cuda.is_available() and not tensor.is_pinned() else tensor
