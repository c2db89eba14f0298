"""The spot worker: a Ray actor beside one replica that trains the drafter while that replica has nothing to do.

It trains alone on its own node's buffer (no process group exists), checks a flag between micro-batches so that a stop
costs at most one of them, and leaves the device empty between sessions: its state lives on the host. What it
learned is a delta against the version all workers agree on; the trainer merges deltas and judges the result.

Every method returns plain data or raises; the trainer decides what a failure means. Long work runs in a thread, so
that `stop` is answered at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_tlt.config import TLTConfig
from verl_tlt.spot.buffer import Buffer
from verl_tlt.spot.merge import Contribution, Merged, merge
from verl_tlt.spot.store import DrafterFile, stage

logger = logging.getLogger(__name__)

Params = dict[str, np.ndarray]
"""Trainable parameters by name, float32."""

HELD_OUT_TOKENS = 32_768
"""Most positions a gate looks at: twice what a paired comparison needs, and still seconds of work."""

WHICH = ("candidate", "served", "frozen")


@dataclass
class SessionResult:
    """One training session as the trainer sees it."""

    steps: int = 0
    tokens: int = 0
    epochs: float = 0.0
    skipped: int = 0
    """Micro-batches with a non-finite loss or gradient."""
    seconds: float = 0.0
    loss: float = math.nan
    """Mean over the session's steps."""
    acc: list[float] = field(default_factory=list)
    """Share of positions whose drafter argmax is the policy's, by draft position."""
    outcome: str = "stopped"
    """stopped (by the trainer) or exhausted (its epochs over the buffer are used up)."""


@dataclass(frozen=True)
class Sampling:
    """The rollout's sampling settings, under which acceptance is judged."""

    temperature: float
    top_p: float
    top_k: int


class SpotWorker:
    """State: the model on the host, the agreed base, the served and the frozen parameters, the buffer, Adam's moments.

    Args:
        name: of the replica it belongs to.
        config: `TLTConfig.to_dict()`.
        policy_dir: the policy's Hugging Face directory, visible on this node.
        drafter: the first drafter, float32.
        sampling: the rollout's.
        device: where training runs during a session.
        agreed: for one that replaces another: `agreed()` of a worker that lives on.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        policy_dir: str,
        drafter: DrafterFile,
        sampling: Sampling,
        device: str,
        agreed: dict[str, Params] | None = None,
    ) -> None:
        import torch

        from verl_tlt.drafter import DrafterTrainer, default_attention, load_drafter

        torch.set_num_threads(1)  # several processes share this machine's cores; spinning threads cost all of them
        self.name, self.device, self.sampling = name, torch.device(device), sampling
        self.config, self.policy_dir = TLTConfig.from_dict(config), policy_dir
        directory = Path(tempfile.mkdtemp(prefix="verl-tlt-spot-"))
        stage(drafter, directory)
        d = self.config.drafter
        # Loaded on the host, but trained on the device.
        self.model = load_drafter(str(directory), policy_dir, attention=default_attention(self.device))
        self.trainer = DrafterTrainer(
            self.model, learning_rate=d.learning_rate, warmup_steps=d.warmup_steps, ttt_steps=d.passes, loss=d.loss
        )
        b = self.config.buffer
        self.buffer: Buffer[Any] = Buffer(max_bytes=b.max_mb << 20, keep_steps=b.keep_steps, held_out=b.held_out)
        self.base: Params = self.trainer.parameters_numpy()
        self.kept: dict[str, Params] = {"served": dict(self.base), "frozen": dict(self.base)}
        self.unmerged_steps = self.unmerged_tokens = 0
        if agreed is not None:
            own = {which: {name: np.array(value) for name, value in params.items()} for which, params in agreed.items()}
            self._start_from(own.pop("candidate"))
            self.kept = own
        self.rng = random.Random(f"{d.seed}-{name}")
        self.stopping = threading.Event()
        self.busy = threading.Lock()  # the model has one set of weights: training, scoring and merging take turns
        self.frozen_known = False
        self.whole_head: Any = None

    # ------------------------------------------------------------------ buffer

    async def add(self, step: int, sequences: list[Any], frozen: list[Any]) -> dict[str, Any]:
        """Take over what the tap captured in one step.

        Args:
            step: the RL step.
            sequences: an ObjectRef for each of the replica's ranks, of a list of what `tlt_take` describes.
            frozen: an ObjectRef of the policy's frozen parts, or nothing where they are as before.

        Returns:
            Buffer statistics: {"tokens", "bytes", "sequences", ...}.
        """
        items = [item for reference in sequences for item in await reference]
        parts = await frozen[0] if frozen else None
        return await asyncio.to_thread(self._add, step, items, parts)

    def _add(self, step: int, items: list[dict[str, Any]], parts: dict[str, np.ndarray] | None) -> dict[str, Any]:
        with self.busy:
            for index, item in enumerate(items):
                nbytes = item["aux"].nbytes + item["last"].nbytes + item["tokens"].nbytes
                self.buffer.add(
                    step=step,
                    index=index,
                    prompt_len=item["start"] + item["prompt_len"],
                    start=item["start"],
                    length=len(item["tokens"]),
                    nbytes=nbytes,
                    payload=item,
                )
            if parts:
                self._refresh(parts)
            return self.buffer.stats()

    def _refresh(self, parts: dict[str, np.ndarray]) -> None:
        from verl_tlt.drafter import FrozenParts, from_numpy16, refresh_frozen

        frozen = FrozenParts(**{k: from_numpy16(v) for k, v in parts.items()})
        refresh_frozen(self.model, frozen)
        # A pruned draft vocabulary is judged against the policy's whole head, which the drafter does not hold.
        self.whole_head = frozen.lm_head if self.model.use_draft_vocab else None
        self.frozen_known = True

    # ------------------------------------------------------------------ sessions

    async def train(self) -> dict[str, Any]:
        """Train until `stop`, or until the buffer's epochs are used up. Returns a `SessionResult` as a dict."""
        self.stopping.clear()
        return asdict(await asyncio.to_thread(self._train))

    async def stop(self) -> float:
        """Ask a running session to end after its micro-batch; returns at once with the worker's unix time."""
        self.stopping.set()
        return time.time()

    def _train(self) -> SessionResult:
        from verl_tlt.drafter import train_until

        result, start = SessionResult(), time.perf_counter()
        if not self.frozen_known or not self.buffer.ready(self.config.buffer.min_tokens):
            result.outcome = "exhausted"
            return result
        with self.busy:
            self.buffer.begin_session(max_epochs=self.config.spot.max_epochs)
            with self._visiting(self.trainer):
                done = train_until(self.trainer, self._batches(), self.stopping.is_set)
        result.steps, result.tokens, result.skipped = done.steps, done.tokens, done.skipped
        self.unmerged_steps += done.steps
        self.unmerged_tokens += done.tokens
        result.epochs = self.buffer.session_epochs()
        result.loss, result.acc = done.loss, list(done.acc_by_position)
        result.outcome = "stopped" if done.stopped else "exhausted"
        result.seconds = time.perf_counter() - start
        return result

    @contextmanager
    def _visiting(self, what: Any) -> Iterator[None]:
        """Model or trainer on the training device for a moment, for whoever holds `busy`."""
        what.to(self.device)
        try:
            yield
        finally:
            what.to("cpu")  # the engine maps fixed sizes when it wakes: leave nothing behind
            _release(self.device)

    def _batches(self) -> Iterator[Any]:
        from verl_tlt.drafter import pack

        while not self.buffer.exhausted():
            windows = self.buffer.sample_batch(self.rng, self.config.drafter.batch_tokens)
            if sequences := [_sequence(w) for w in windows if w.tokens > 1]:
                yield pack(sequences)

    # ------------------------------------------------------------------ merge

    async def contribute(self) -> Contribution:
        """What this worker learned since its last merge."""
        return await asyncio.to_thread(self._contribute)

    def _contribute(self) -> Contribution:
        with self.busy:
            return Contribution(self.name, self.unmerged_tokens, self.unmerged_steps, self._own_delta())

    def _own_delta(self) -> Params:
        now = self.trainer.parameters_numpy()
        return {name: now[name] - self.base[name] for name in self.base}

    async def merge(self, *contributions: Contribution) -> Merged:
        """Average several workers' deltas by tokens (runs on one worker; they arrive through the object store)."""
        return await asyncio.to_thread(merge, contributions, min_steps=self.config.spot.min_merge_steps)

    async def adopt(self, merged: Merged) -> None:
        """Move to the new agreed version: base plus the merged delta, on every worker alike.

        A worker left out for too few steps keeps its own progress on top and hands it in later; one left out for
        broken numbers starts again from the agreed version, with fresh moments: they may be what broke it.
        """
        await asyncio.to_thread(self._adopt, merged)

    def _adopt(self, merged: Merged) -> None:
        with self.busy:
            own = self._own_delta()
            sound = all(np.isfinite(v).all() for v in own.values())
            if merged.delta is not None:
                self.base = {name: self.base[name] + merged.delta[name] for name in self.base}
            if sound and self.name not in merged.included:
                self.trainer.load_parameters({name: self.base[name] + own[name] for name in own})
                return
            self._start_from(self.base)
            if not sound:
                self.trainer.optimizer.state.clear()
                self.trainer.steps = 0  # warm up again

    def _start_from(self, params: Params) -> None:
        self.base = dict(params)
        self.trainer.load_parameters(self.base)
        self.unmerged_steps = self.unmerged_tokens = 0

    async def agreed(self) -> dict[str, Params]:
        """What all workers hold alike, for one that joins them: candidate, served and frozen parameters."""
        return {"candidate": self.base, **self.kept}

    async def keep(self, which: str) -> None:
        """The agreed version is published: remember it as the served one."""
        self.kept[which] = dict(self.base)

    async def revert(self, which: str) -> None:
        """Go back to the served or the frozen parameters; the candidate is given up."""
        await asyncio.to_thread(self._revert, which)

    def _revert(self, which: str) -> None:
        with self.busy:
            self._start_from(self.kept[which])

    # ------------------------------------------------------------------ judging and publishing

    async def score(self, max_draft: int) -> dict[str, Any]:
        """Score candidate, served and frozen on this node's held-out sequences.

        Returns:
            {"positions": int64 [S], which: float64 [S, 1+K] (`spot.gate.Scores`) for each in `WHICH`}; S may be 0.
        """
        return await asyncio.to_thread(self._score, max_draft)

    def _score(self, max_draft: int) -> dict[str, Any]:
        from verl_tlt.drafter import acceptance

        out: dict[str, Any] = {"positions": []}
        with self.busy:  # all three on the same sequences, under the same frozen parts
            sequences = [_sequence(w) for w in self.buffer.held_out(HELD_OUT_TOKENS) if w.tokens > 1]
            if not self.frozen_known or not sequences:
                return out
            with self._visiting(self.model):  # without the optimizer: scoring shares the device with the policy
                head = None if self.whole_head is None else self.whole_head.to(self.device)
                for which in WHICH:
                    with self._holding(self.base if which == "candidate" else self.kept[which]):
                        scores = acceptance(
                            self.model,
                            sequences,
                            temperature=self.sampling.temperature,
                            top_p=self.sampling.top_p,
                            top_k=self.sampling.top_k,
                            max_draft=max_draft,
                            lm_head=head,
                        )
                    out["positions"] = np.array([s.positions for s in scores], dtype=np.int64)
                    out[which] = np.array([[s.drafts, *s.accepted] for s in scores])
                del head
        return out

    @contextmanager
    def _holding(self, params: Params) -> Iterator[None]:
        """The model with other parameters for a moment, for whoever holds `busy`; the worker's own come back."""
        own = self.trainer.parameters_numpy()
        self.trainer.load_parameters(params)
        try:
            yield
        finally:
            self.trainer.load_parameters(own)

    async def export(self, version: int, dtype: str, acceptance: list[float]) -> DrafterFile:
        """The agreed version as vLLM loads it."""
        return await asyncio.to_thread(self._export, version, dtype, acceptance)

    def _export(self, version: int, dtype: str, acceptance: list[float]) -> DrafterFile:
        from verl_tlt.drafter import to_drafter_file

        with self.busy, self._holding(self.base):
            config, weights, fingerprint = to_drafter_file(self.model, dtype)
        return DrafterFile(version, config, weights, fingerprint, tuple(acceptance))

    # ------------------------------------------------------------------ checkpoint

    async def save(self, directory: str, provenance: dict[str, Any]) -> str:
        """Write the served drafter and the training state atomically under `directory`; returns it."""
        return await asyncio.to_thread(self._save, directory, provenance)

    def _save(self, directory: str, provenance: dict[str, Any]) -> str:
        from verl_tlt.drafter import save_drafter

        with self.busy:
            state = self.trainer.state()  # of the candidate, which may be ahead of what is served
            facts = {**provenance, "steps": self.trainer.steps}
            with self._holding(self.kept["served"]):
                save_drafter(self.model, directory, facts, policy=self.policy_dir, training_state=state)
        return directory

    async def resume(self, directory: str) -> bool:
        """Continue candidate, moments and step count from a checkpoint; False where it holds none."""
        return await asyncio.to_thread(self._resume, directory)

    def _resume(self, directory: str) -> bool:
        from verl_tlt.drafter import load_training_state

        state = load_training_state(directory)
        if state is None:
            return False
        with self.busy:
            self.trainer.load_state(state)
            self.base = self.trainer.parameters_numpy()
        return True


def _sequence(window: Any) -> Any:
    """A buffer window as the drafter's `Sequence`; views, not copies."""
    import torch

    from verl_tlt.drafter import Sequence, from_numpy16

    item, begin, end = window.payload, window.begin, window.end
    return Sequence(
        tokens=torch.from_numpy(item["tokens"][begin:end].copy()),  # [L]; the store's arrays are read-only
        prompt_len=max(0, window.prompt_len - window.start),
        aux=from_numpy16(item["aux"][begin:end]),  # [L, 3H]
        last=from_numpy16(item["last"][begin:end]),  # [L, H]
        start=window.start,
    )


def _release(device: Any) -> None:
    """Give cached device memory back to the driver: the engine needs all of it."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
