"""A drafter's visits to the training device: what goes there, what comes back, how much room they need.

Between two visits it lives on the host, because the device is the engine's or the actor's. The end of a visit is waited
for, so only what training has changed comes back: the trained weights and AdamW's two moments, into pinned memory where
CUDA copies. The policy's embedding, head and norm go there in 16 bits and are dropped there: the host has them still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

    from verl_tlt.drafter.train import DrafterTrainer

FROZEN = torch.bfloat16
"""What frozen weights become on the device: the dtype that matrix products there have anyway (`mixed_precision`)."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's; it keeps its step count on the host."""

Copy = Callable[[torch.Tensor, torch.Tensor], Any]
"""Copy the second tensor into the first."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one visit moves."""

    there: int
    back: int
    """What its end waits for."""


def traffic(model: Eagle3DraftModel, *, trains: bool = True) -> Traffic:
    """What a visit moves: to train, once there are moments; or only to score, after which nothing has changed."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() * FROZEN.itemsize for p in model.parameters() if not p.requires_grad)
    changing = (1 + len(MOMENTS)) * trained if trains else 0
    return Traffic((changing or trained) + frozen + sum(b.nbytes for b in model.buffers()), changing)


def session_bytes(model: Eagle3DraftModel, rows: int, passes: int) -> int:
    """Device memory of a session at its peak, in bytes, by rule of thumb: 10 GB for a 7B policy at 1024 rows.

    Args:
        model: the drafter.
        rows: of the largest batch that is trained or scored.
        passes: of the training-time test.
    """
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)  # while scoring: a second set of weights
    # Logits and their gradients in 16 bits for each pass; or five float32 values for each logit (`acceptance`).
    logits = rows * model.draft_vocab_size * max(20, 8 + 4 * passes)
    return traffic(model).there + gradients + logits


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


@contextmanager
def visiting(
    trainer: DrafterTrainer, device: torch.device, *, trains: bool = True, copy: Copy = _copy
) -> Iterator[None]:
    """Drafter and optimizer on `device` inside the block; afterwards at home, and the device is as empty as before.

    Args:
        trainer: on the host.
        device: where to.
        trains: whether weights and moments may change; they are not brought back otherwise.
        copy: how tensors cross; a test counts with it.
    """
    state = trainer.optimizer.state
    trained = [(p, _pinned(p.data)) for p in trainer.parameters.values()]
    everything = [*trainer.model.parameters(), *trainer.model.buffers()]
    frozen = [(t, t.data) for t in everything if not t.requires_grad]
    # Homes of moments are made now, also for those that do not exist yet: later a stop would wait for it.
    moments = [(p, key, _moment(state, p, key)) for p, _ in trained for key in MOMENTS] if trains else []

    def go() -> None:
        for tensor, home in trained + frozen:
            halved = not tensor.requires_grad and isinstance(tensor, torch.nn.Parameter)
            tensor.data = there(home, FROZEN if halved else home.dtype)
        for parameter, key, home in moments:
            if parameter in state:
                state[parameter][key] = there(home, home.dtype)

    def there(home: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        target = torch.empty_like(home, dtype=dtype, device=device)
        copy(target, home)
        return target

    def come_back() -> None:
        for parameter, home in trained:
            copy(home, parameter.data)
        for parameter, key, home in moments:
            if parameter in state:
                copy(home, state[parameter][key])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def drop() -> None:
        for tensor, home in trained + frozen:
            tensor.grad = None
            tensor.data = home
        for parameter, key, home in moments:
            if parameter in state:
                state[parameter][key] = home
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engine maps fixed sizes when it wakes: it needs all of the memory

    with ExitStack() as leaving:
        leaving.callback(drop)  # the last thing to happen, whatever else fails
        go()
        if trains:
            leaving.callback(come_back)
        yield


def _moment(state: Mapping[torch.Tensor, Any], parameter: torch.Tensor, key: str) -> torch.Tensor:
    """One of a parameter's moments, or a place for it."""
    return _pinned(state[parameter][key] if parameter in state else torch.zeros_like(parameter))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that CUDA copies from and to at full speed, where there is CUDA."""
    return tensor.pin_memory() if torch.cuda.is_available() and not tensor.is_pinned() else tensor
