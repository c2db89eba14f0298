"""The parts of the policy that the drafter shares, copied to the host while a weight sync streams past.

That is the one moment in which every full tensor passes by anyway. Embedding and head are large (2.2 GB in 16 bits for
a 7B policy) and everybody waits for a weight sync. So one rank of each node copies them, and only when it was told that
the drafter will be trained; what leaves the device has 16 bits; it goes to memory that is kept for the run, page-locked
where CUDA is; and the object store's copy is made in a thread, while the next rollout runs. Whatever fails here costs
the drafter its newest weights, not the sync.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_tlt.drafter import to_numpy16
from verl_tlt.drafter.names import policy_part
from verl_tlt.messages.training import VerifierArrays

logger = logging.getLogger(__name__)

VERIFIER_PARTS = ("embed", "lm_head", "norm")
"""The policy's parts the drafter shares (`names.policy_part`)."""

PUT_S = 60.0
"""Seconds for the object store's copy of at most some GB, begun a rollout ago."""

Params = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Captured:
    """What this rank copied since it was last asked."""

    reference: Any = None
    """What `put` made of the `VerifierArrays`; None: nothing new was copied."""
    seconds: float = 0.0
    """Of the weight sync, or of whoever asked."""
    nbytes: int = 0
    """That left the device."""
    errors: int = 0


class VerifierCapture:
    """One rank's copies. Used by one thread at a time.

    Args:
        dtype: 16-bit dtype of the copies (the rollout's).
        put: hands the arrays to the object store, copying them.
        tied: the policy's head is its embedding, under whichever names it streams.
    """

    def __init__(self, dtype: torch.dtype, put: Callable[[VerifierArrays], Any], tied: bool = False) -> None:
        self.armed = False
        """The coming weight sync is copied from."""
        self._dtype, self._put = dtype, put
        self._wanted = [part for part in VERIFIER_PARTS if not (tied and part == "lm_head")]
        self._host: dict[str, torch.Tensor] = {}  # kept for the run: locking pages takes longer than the copy
        self._arrived: set[str] = set()
        self._seen = False
        self._putting: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1, "tlt-verifier")
        self._seconds, self._nbytes, self._errors = 0.0, 0, 0

    def tee(self, params: Params) -> Params:
        """Hand `params` on as they are; what the drafter shares is copied on the way."""
        for name, tensor in params:
            part = policy_part(name)
            if self.armed and part is not None and part in self._wanted:
                with self._contained():
                    self._keep(part, tensor)
            yield name, tensor

    def finish(self, base: Callable[[], Mapping[str, torch.Tensor]] | None) -> None:
        """The sync is over: what came goes to the object store, in the background.

        Args:
            base: reads the parts where they never stream past, nor change: with LoRA, when the rollout loads the base
                itself. None: not such a sync.
        """
        with self._contained():
            if self.armed and base is not None and not self._seen and not self._arrived:
                for part, tensor in base().items():
                    if part in self._wanted:
                        self._keep(part, tensor)
            if self.armed and {"embed", "norm"} <= self._arrived:
                self._seen = True
                self._putting = self._thread.submit(self._put, self._arrays())
        self.armed, self._arrived = False, set()

    def take(self) -> Captured:
        """What was copied, once."""
        reference, putting, self._putting = None, self._putting, None
        with self._contained():
            reference = putting.result(PUT_S) if putting else None
        found = Captured(reference, self._seconds, self._nbytes, self._errors)
        self._seconds, self._nbytes, self._errors = 0.0, 0, 0
        return found

    def _keep(self, part: str, tensor: torch.Tensor) -> None:
        """Copy one tensor in 16 bits: cast where it is, so that half of it crosses."""
        if self._putting is not None:
            self._putting.result(PUT_S)  # nobody asked for the copy before this one: it is overwritten once it is read
        short = tensor.detach().to(self._dtype)
        held = self._host.get(part)
        if held is None or held.shape != short.shape:
            held = self._host[part] = torch.empty(short.shape, dtype=self._dtype, pin_memory=short.is_cuda)
        held.copy_(short)
        self._arrived.add(part)
        self._nbytes += held.nbytes

    def _arrays(self) -> VerifierArrays:
        arrays: dict[str, np.ndarray] = {part: to_numpy16(self._host[part]) for part in self._arrived}
        arrays.setdefault("lm_head", arrays["embed"])  # tied: copied once, stored once
        return VerifierArrays(**arrays)

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Timed; a failure ends the copying for this sync."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.armed, self._putting = False, None
            self._errors += 1
            logger.warning("the policy's embedding, head and norm could not be copied for the drafter: %r", error)
        finally:
            self._seconds += time.perf_counter() - start
