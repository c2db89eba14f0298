"""Where a drafter is while it trains: on the training device for a session, on the host between two of them.

RL waits for the end of a session, so only what training has changed is copied back: the trained weights and AdamW's
state. On the host all of it lies in one page-locked block, made before the first session: locking takes longer than
copying, and a stop would wait for it. The block holds first what stays as it is, then what is trained, then the
optimizer's state, so that one copy takes everything there, and one brings back what has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl_tlt.drafter.evaluate import PROBABILITY_ROWS
from verl_tlt.drafter.host_memory import layout, page_locked, views
from verl_tlt.drafter.train import STATE

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

    from verl_tlt.drafter.train import DrafterTrainer

VERSIONS_HELD = 3
"""Copies of the trained parameters beside the model's own: candidate, served and initial drafter."""


def _bytes(model: Eagle3DraftModel) -> tuple[int, int]:
    """(bytes that are trained, bytes that are not: the policy's weights in 16 bits, and buffers)."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(2 * p.numel() for p in model.parameters() if not p.requires_grad)
    return trained, frozen + sum(b.nbytes for b in model.buffers())


def session_bytes(model: Eagle3DraftModel, rows: int, passes: int, scored: int = 0) -> int:
    """Device memory of a session at its peak, in bytes, by arithmetic: 13 GB for a 7B policy at 1024 rows.

    `rows`: of the largest batch that is trained; `scored`: of the largest that is scored; `passes`: of the
    training-time test.
    """
    scored = rows if scored is None else scored
    trained, frozen = _bytes(model)
    # In float32 the batch that is trained and the next one, and in 16 bits the one that is arriving.
    batches = max(rows, scored) * (max(1, len(model.target_layer_ids)) + 1) * model.hidden_size * 10
    # Targets, and each pass's logits with their gradients, in 16 bits.
    training = activation_bytes(model, rows, passes) + rows * model.draft_vocab_size * (8 + 4 * passes)
    # The logits of both, and the policy's probabilities; and five float32 values for each logit of a block of rows.
    scoring = scored * model.draft_vocab_size * 8 + PROBABILITY_ROWS * model.verifier_vocab_size * 20
    scoring += activation_bytes(model, scored, 1)
    if model.use_draft_vocab:  # then scores take the policy's whole head
        scoring += model.verifier_vocab_size * 2 * model.hidden_size
    # With the gradients, or a second set of weights in scoring; and autocast's copy of the weights in 16 bits.
    weights = (1 + len(STATE) + 1) * trained + trained // 2 + frozen
    return weights + batches + max(training, scoring)


def activation_bytes(model: Eagle3DraftModel, rows: int, passes: int) -> int:
    """What the passes over a batch of so many rows keep for the backward pass besides logits, in bytes.

    Matrix products are in 16 bits, norms in float32; keys and values of all passes so far are repeated for every query
    head and pass, as is the attention's mask over them.
    """
    layer = model.config.transformer_layer_config
    heads = layer.num_attention_heads
    attention = heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
    each = 44 * layer.hidden_size + 4 * attention + 8 * layer.intermediate_size  # bytes of a row in each pass
    if any("q_norm" in name for name, _ in model.named_parameters()):  # Qwen3.5's MTP head, whose attention is gated
        each += 16 * (layer.hidden_size + attention)
    keys = passes * (passes + 1) // 2  # of a row, over all passes
    return rows * (passes * each + 12 * layer.hidden_size + keys * (4 * attention + 2 * rows) + passes * rows)


def host_bytes(model: Eagle3DraftModel) -> int:
    """Host memory of a spot worker beside its buffer, in bytes, where it trains on an accelerator: 10 GB for 7B."""
    trained, frozen = _bytes(model)
    whole_head = 2 * model.verifier_vocab_size * model.hidden_size if model.use_draft_vocab else 0
    return (1 + len(STATE) + VERSIONS_HELD) * trained + frozen + whole_head


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class DrafterMemory:
    """The block of host memory that a drafter and its optimizer live in from now on, where they are not on a device."""

    def __init__(self, trainer: DrafterTrainer) -> None:
        everything = [*trainer.model.parameters(), *trainer.model.buffers()]
        frozen, trained = [t for t in everything if not t.requires_grad], list(trainer.parameters.values())
        state = [value for values in trainer.optimizer.state.values() for value in values.values()]
        self.tensors = [*frozen, *trained, *state]
        sizes = [t.nbytes for t in self.tensors]
        self.changing = layout(sizes[: len(frozen)])[1]
        """Where the part begins that training changes."""
        self.optimizer = layout(sizes[: len(frozen) + len(trained)])[1]
        """Where the optimizer's state begins."""
        self.block = page_locked(layout(sizes)[1])
        self._here = views(self.block, self.tensors)
        for tensor, here in zip(self.tensors, self._here, strict=True):
            here.copy_(tensor.data)
        self.come_home()

    def come_home(self) -> None:
        """Point every tensor at its place in the block again, without a copy; gradients are dropped."""
        for tensor, here in zip(self.tensors, self._here, strict=True):
            tensor.grad = None
            tensor.data = here


class DeviceResidency:
    """Keeps a drafter and its optimizer on a device for the length of a `with` block.

    Afterwards they are on the host again, whatever failed, and the device is as empty as before.

    `trains`: whether weights and moments may change there; moments stay on the host otherwise.
    """

    def __init__(self, memory: DrafterMemory, device: torch.device, *, trains: bool = True) -> None:
        self._memory, self._device, self._trains = memory, device, trains
        self._there = torch.empty(0)

    def __enter__(self) -> None:
        """Copy all that a session needs to the device."""
        memory = self._memory
        try:
            source = memory.block if self._trains else memory.block[: memory.optimizer]
            self._there = torch.empty_like(source, device=self._device)
            _copy(self._there, source)
            there = views(self._there, memory.tensors)
            for tensor, moved in zip(memory.tensors, there, strict=False):  # fewer where the moments stay
                tensor.data = moved
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *_: object) -> None:
        """Copy back what training has changed, and give up the device's memory."""
        memory = self._memory
        try:
            if self._trains:
                _copy(memory.block[memory.changing :], self._there[memory.changing :])
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._memory.come_home()
        self._there = torch.empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the engine maps fixed sizes when it wakes: it needs all of the memory
