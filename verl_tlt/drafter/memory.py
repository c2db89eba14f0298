"""Memory of a drafter that trains: page-locked on the host, on the training device for a session.

RL waits for the end of a session, so only what training has changed is copied back. On the host all lies in one
page-locked block, made before the first session: what stays, then trained weights, then the optimizer's state. torch's
`pin_memory` would take the next power of two of each tensor's bytes (8.6 GB for a 7B policy's drafter, not 4.8).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from verl_tlt.drafter.build import has_own_head, own_frozen, policy_width
from verl_tlt.drafter.data import Batch, TrainingSequence, pack
from verl_tlt.drafter.evaluate import PROBABILITY_ROWS
from verl_tlt.drafter.train import STATE, DrafterTrainer
from verl_tlt.errors import TLTError

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

logger = logging.getLogger(__name__)

VERSIONS_HELD = 4
"""Most copies of the trained parameters beside the model's own: the initial drafter, the served one, the candidate, and
for a moment the drafter that is being published."""
ALIGNMENT = 256
"""Bytes; no kernel and no copy engine asks for more."""
MARGIN = 0.03
"""Share of the device's memory that a session leaves free, since contexts and pools of actor and engine grow."""
FEWEST_ROWS = 256
"""Fewest rows of a micro-batch: with fewer, a step's fixed costs would take most of its time."""
GIB = 2**30
PORTABLE = 1
"""cudaHostRegisterPortable: the memory is page-locked for every device of the process."""


# ------------------------------------------------------------------ how much, by arithmetic


def _bytes(model: Eagle3DraftModel) -> tuple[int, int]:
    """(bytes that are trained, bytes that are not).

    The latter are the policy's weights in 16 bits, an embedding and head of the drafter's own in 32, and buffers.
    """
    own = own_frozen(model)
    trained = 0
    frozen = sum(b.nbytes for b in model.buffers())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained += parameter.nbytes
        else:
            frozen += (4 if name in own else 2) * parameter.numel()
    return trained, frozen


def session_bytes(model: Eagle3DraftModel, rows: int, passes: int, scored: int = 0) -> int:
    """Device memory of a session at its peak, in bytes, by arithmetic: 13 GB for a 7B policy at 1024 rows.

    `rows` and `scored`: of the largest batch that is trained and scored; `passes`: of the training-time test.
    """
    trained, frozen = _bytes(model)
    # In float32 the batch that is trained and the next one, and in 16 bits the one that is arriving.
    batches = max(rows, scored) * (max(1, len(model.target_layer_ids)) + 1) * policy_width(model) * 10
    # Targets, and each pass's logits with their gradients, in 16 bits.
    training = activation_bytes(model, rows, passes) + rows * model.draft_vocab_size * (8 + 4 * passes)
    # The logits of both, and the policy's probabilities; and five float32 values for each logit of a block of rows.
    scoring = scored * model.draft_vocab_size * 8 + PROBABILITY_ROWS * model.verifier_vocab_size * 20
    scoring += activation_bytes(model, scored, 1)
    if model.use_draft_vocab:  # then scores take the policy's whole head
        scoring += model.verifier_vocab_size * 2 * policy_width(model)
    # With the gradients, or a second set of weights in scoring; and autocast's copy of the weights in 16 bits.
    weights = (1 + len(STATE) + 1) * trained + trained // 2 + frozen
    return weights + batches + max(training, scoring)


def activation_bytes(model: Eagle3DraftModel, rows: int, passes: int) -> int:
    """Bytes that `passes` over a batch keep for the backward pass besides logits: products in 16 bits, norms in 32.

    Keys and values of all passes so far are repeated for every query head and pass, as is the attention's mask.
    """
    layer = model.config.transformer_layer_config
    heads = layer.num_attention_heads
    attention = heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
    row_bytes = 44 * layer.hidden_size + 4 * attention + 8 * layer.intermediate_size  # in each pass
    if any("q_norm" in name for name, _ in model.named_parameters()):  # Qwen3.5's MTP head, whose attention is gated
        row_bytes += 16 * (layer.hidden_size + attention)
    if experts := getattr(layer, "num_experts_per_tok", 0):  # a copy of the row for each, multiplied in 32 bits
        row_bytes += 8 * experts * (layer.hidden_size + layer.moe_intermediate_size)
    keys = passes * (passes + 1) // 2  # of a row, over all passes
    # Autocast makes a copy of a weight that is not trained in each product, and does not share it.
    copies = 2 * passes * model.lm_head.weight.numel() if has_own_head(model) else 0
    return copies + rows * (
        passes * row_bytes + 12 * layer.hidden_size + keys * (4 * attention + 2 * rows) + passes * rows
    )


def host_bytes(model: Eagle3DraftModel) -> int:
    """Host memory of the spot trainer beside its buffer, in bytes, with an accelerator: 11 GB for an 8B policy."""
    trained, frozen = _bytes(model)
    whole_head = 2 * model.verifier_vocab_size * policy_width(model) if model.use_draft_vocab else 0
    return (1 + len(STATE) + VERSIONS_HELD) * trained + frozen + whole_head


# ------------------------------------------------------------------ page-locked memory of the host


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(first byte of each, bytes of all) for tensors of these `sizes`, in bytes, side by side in one block."""
    ends = list(accumulate((size + -size % ALIGNMENT for size in sizes), initial=0))
    return ends[:-1], ends[-1]


def views(block: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes in `block`, uint8 [bytes], where `layout` places them; no more than fit."""
    begins, _ = layout([t.nbytes for t in like])
    found = []
    for tensor, begin in zip(like, begins, strict=True):
        end = begin + tensor.nbytes
        if end <= len(block):
            found.append(block[begin:end].view(tensor.dtype).view(tensor.shape))
    return found


def page_locked(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], page-locked where CUDA is and for as long as this tensor lives; ordinary memory if that fails."""
    block = torch.empty(nbytes, dtype=torch.uint8)
    if torch.cuda.is_available() and nbytes:
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(cuda.cudaHostRegister(block.data_ptr(), nbytes, PORTABLE))
        if error:
            _forget_refusal()
            logger.warning("%d MiB could not be page-locked (CUDA error %d): copies are slower", nbytes >> 20, error)
        else:
            weakref.finalize(block, _unlock, cuda, block.data_ptr()).atexit = False
    return block


def _unlock(cuda: Any, address: int) -> None:
    if int(cuda.cudaHostUnregister(address)):
        _forget_refusal()


def _forget_refusal() -> None:
    """Clear the error that a refused call leaves in CUDA's runtime: the next launch raises it, so launch one."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


# ------------------------------------------------------------------ where a drafter is


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class DrafterMemory:
    """The block of host memory that holds a drafter and its optimizer from now on, while they are on no device."""

    def __init__(self, trainer: DrafterTrainer) -> None:
        everything = [*trainer.model.parameters(), *trainer.model.buffers()]
        frozen = [t for t in everything if not t.requires_grad]
        trained = list(trainer.parameters.values())
        state = [value for values in trainer.optimizer.state.values() for value in values.values()]
        self.tensors = [*frozen, *trained, *state]
        begins, nbytes = layout([t.nbytes for t in self.tensors])
        self.changing = begins[len(frozen)]
        """First byte of what training changes: trained weights, then the optimizer's state."""
        self.optimizer = begins[len(frozen) + len(trained)]
        """First byte of the optimizer's state, which only a block that trains needs on its device."""
        self.block = page_locked(nbytes)
        self._on_host = views(self.block, self.tensors)
        for tensor, place in zip(self.tensors, self._on_host, strict=True):
            place.copy_(tensor.data)
        self._live_in(self._on_host)

    @contextmanager
    def on(self, device: torch.device, *, trains: bool = True) -> Iterator[None]:
        """Put the drafter on a device for a `with` block; weights are copied back only if the block `trains`."""
        on_device = torch.empty(0)
        try:
            source = self.block if trains else self.block[: self.optimizer]
            on_device = torch.empty_like(source, device=device)
            _copy(on_device, source)
            self._live_in(views(on_device, self.tensors))
            try:
                yield
            finally:
                if trains:
                    _copy(self.block[self.changing :], on_device[self.changing :])
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
        finally:
            for tensor in self.tensors:
                tensor.grad = None
            self._live_in(self._on_host)
            del on_device
            if device.type == "cuda":
                torch._C._cuda_clearCublasWorkspaces()  # tens of MB
                torch.cuda.empty_cache()  # the engine maps fixed sizes when it wakes: it needs all of the memory

    def _live_in(self, places: Sequence[torch.Tensor]) -> None:
        """Point the tensors at these places, without a copy; those behind the last one stay where they are."""
        for tensor, place in zip(self.tensors, places, strict=False):
            tensor.data = place


class NoRoomError(TLTError):
    """A device has too little free memory for a session."""


def check_room(needed: int, free: int, total: int) -> None:
    """Raise a `NoRoomError` where a session that takes `needed` bytes does not fit into a device's free memory."""
    if needed > free - MARGIN * total:
        raise NoRoomError(
            f"a session needs {needed / GIB:.1f} GiB of device memory, and {free / GIB:.1f} of {total / GIB:.1f} GiB "
            "are free: have the actor offload its parameters and optimizer."
        )


class TrainingDevice:
    """The device on which a drafter trains: `kind` is "cuda" or "cpu", and which GPU it is may change by session.

    An accelerator belongs to the actor and the engine, which count on its memory: running out of it there ends the run.
    So a session begins with a check of the free memory, and leaves nothing on the device.
    """

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)
        self.is_accelerator = self.device.type != "cpu"
        self._memory: DrafterMemory | None = None
        self._pinned = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def at(self, index: int) -> Iterator[None]:
        """Have the GPU of this number be the device, also for kernels of this thread, inside the block."""
        if not self.is_accelerator:
            yield
            return
        self.device = torch.device(self.device.type, index)
        self.memory()  # opens a context
        with torch.cuda.device(self.device):
            yield

    def packed(self, sequences: list[TrainingSequence]) -> Batch:
        """One batch of these sequences, in page-locked memory for an accelerator; called from any thread."""
        if not self.is_accelerator:
            return pack(sequences)
        with torch.cuda.device(self.device):  # or locking would open a context on the first GPU, which may decode
            return pack(sequences, pinned=True)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of an accelerator; a `NoRoomError` where not even a context of CUDA's has room."""
        try:
            return torch.cuda.mem_get_info(self.device)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise NoRoomError(f"{self.device} has no memory left for a CUDA context.") from error

    def receive(self, trainer: DrafterTrainer) -> None:
        """Make the sessions' host memory in advance: it takes seconds for a large drafter, and no session may wait."""
        if self.is_accelerator:
            self._memory = DrafterMemory(trainer)

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Page-locked host copy of a tensor, which an accelerator reads at full speed; reuses the previous buffer."""
        if not self.is_accelerator:
            return tensor
        if len(self._pinned) != tensor.nbytes:
            self._pinned = page_locked(tensor.nbytes)
        return views(self._pinned, [tensor])[0].copy_(tensor)

    def rows(self, trainer: DrafterTrainer, most: int, scored: int) -> int:
        """Rows of a session's micro-batches: `most`, halved until memory suffices; `scored`: of a scored batch."""
        if not self.is_accelerator:
            return most
        free, total = self.memory()
        usable = free - MARGIN * total
        rows = most
        while rows >= 2 * FEWEST_ROWS and session_bytes(trainer.model, rows, trainer.ttt_steps, scored) > usable:
            rows //= 2
        if rows < most:
            logger.warning("%.1f GiB of device memory are free: batches have %d rows, not %d", free / GIB, rows, most)
        return rows

    def resident(
        self, trainer: DrafterTrainer, rows: int, scored: int = 0, *, trains: bool = True
    ) -> AbstractContextManager[None]:
        """The drafter on the device inside the block, and off it afterwards; a `NoRoomError` where it does not fit.

        `rows`, `scored`: of the largest batch trained and scored; only a block that `trains` changes the weights.
        """
        if not self.is_accelerator:
            return nullcontext()
        check_room(session_bytes(trainer.model, rows, trainer.ttt_steps, scored), *self.memory())
        self._memory = self._memory or DrafterMemory(trainer)
        return self._memory.on(self.device, trains=trains)
