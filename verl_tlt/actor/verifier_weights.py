"""Copies the weights that the drafter shares with the policy: embedding, head and final norm.

They are copied while a weight sync streams by. Everybody waits for the sync, and these parts are large (2.2 GB for a 7B
policy). So the first rank alone copies them to page-locked memory, and a thread puts them into the object store during
the next rollout. If copying fails, the drafter trains with the weights from before; the weight sync is not affected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl_tlt.drafter import to_numpy16
from verl_tlt.drafter.memory import page_locked, views
from verl_tlt.drafter.verifier import policy_part
from verl_tlt.messages.training import VerifierArrays

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

VERIFIER_PARTS = ("embed", "lm_head", "norm")
"""The policy's parts the drafter shares (`drafter.verifier.policy_part`)."""
PUT_S = 60.0
"""Most seconds to wait for the object store's copy of at most some GB, begun a rollout ago."""

Params = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Captured:
    """What this rank copied since the last `take`."""

    reference: ObjectRef | None = None
    """What `put` made of the `VerifierArrays`; None: nothing new was copied."""
    seconds: float = 0.0  # time that the weight sync, or the caller of `take`, waited for it
    errors: int = 0


class VerifierCapture:
    """One rank's copies, in `dtype`, of 16 bits, which `put` copies to the object store. Used by one thread at a time.

    `tied`: the policy's head is its embedding; `norm_offset` is added to the final norm's weight.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        put: Callable[[VerifierArrays], ObjectRef],
        tied: bool = False,
        norm_offset: float = 0.0,
    ) -> None:
        self._dtype = dtype
        self._put = put
        self._norm_offset = norm_offset
        self._wanted = [part for part in VERIFIER_PARTS if not (tied and part == "lm_head")]
        self._locked: dict[str, torch.Tensor] = {}  # kept for the run: locking pages takes longer than the copy
        self._host: dict[str, torch.Tensor] = {}  # the same, as tensors of the policy's shapes
        self._arrived: set[str] = set()
        self._failed = False  # copying from the present sync
        self._putting: Future[ObjectRef] | None = None
        self._thread = ThreadPoolExecutor(1, "tlt-verifier")
        self._logged = False
        self._seconds = 0.0
        self._errors = 0

    def tee(self, params: Params) -> Params:
        """Hand `params` on as they are; what the drafter shares is copied on the way."""
        for name, tensor in params:
            part = policy_part(name)
            if part is not None and part in self._wanted and not self._failed:
                with self._contained():
                    if part == "norm":
                        self._keep(part, tensor.float() + self._norm_offset)
                    else:
                        self._keep(part, tensor)
            yield name, tensor

    def finish(self) -> None:
        """Put what arrived into the object store, in the background; nothing where the sync brought none of it."""
        with self._contained():
            if self._arrived and not self._failed:
                missing = [part for part in self._wanted if part not in self._arrived]
                if missing:
                    raise RuntimeError(f"{' and '.join(missing)} did not arrive with the weight sync")
                arrays = {part: to_numpy16(self._host[part]) for part in self._arrived}
                arrays.setdefault("lm_head", arrays["embed"])  # tied: copied once, stored once
                self._putting = self._thread.submit(self._put, VerifierArrays(**arrays))
        self._failed = False
        self._arrived = set()

    def take(self) -> Captured:
        """What was copied since the last call."""
        reference: ObjectRef | None = None
        putting = self._putting
        self._putting = None
        with self._contained():
            reference = putting.result(PUT_S) if putting else None
        captured = Captured(reference, self._seconds, self._errors)
        self._failed = False
        self._seconds = 0.0
        self._errors = 0
        return captured

    def _keep(self, part: str, tensor: torch.Tensor) -> None:
        """Copy one tensor to the host in 16 bits, cast on its own device, so that half of its bytes cross."""
        if self._putting is not None:
            self._putting.result(PUT_S)  # nobody took the copy before this one: overwrite it once it is read
        short = tensor.detach().to(self._dtype)
        host = self._host.get(part)
        if host is None or host.shape != short.shape:
            self._locked[part] = page_locked(short.nbytes)
            host = self._host[part] = views(self._locked[part], [short])[0]
        host.copy_(short)
        self._arrived.add(part)

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Time the block; a failure ends the copying for this sync."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._failed = True
            self._putting = None
            self._errors += 1
            log = logger.debug if self._logged else logger.warning
            self._logged = True
            log("the policy's embedding, head and norm could not be copied for the drafter: %r", error)
        finally:
            self._seconds += time.perf_counter() - start
