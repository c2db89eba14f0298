"""What a spot worker knows and does, without Ray: train, hand in, adopt, judge, export, save.

A learner trains alone on its own buffer and leaves the device empty between sessions: its state lives on the host. What
it learned is a delta against the version all learners agree on; `spot_worker.merge` averages deltas, `trainer.gate`
judges the result. Three sets of parameters are kept besides its own: the agreed one (the candidate), the served and the
initial.
"""

from __future__ import annotations

import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterTrainer,
    Sequence,
    VerifierWeights,
    acceptance,
    default_attention,
    from_numpy16,
    load_drafter,
    load_training_state,
    pack,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
    to_drafter_file,
    train_until,
)
from verl_tlt.drafter.staging import stage
from verl_tlt.messages import DrafterFile
from verl_tlt.spot_worker.buffer import Buffer, Window
from verl_tlt.spot_worker.merge import Contribution, Merged

Params = dict[str, np.ndarray]
"""Trainable parameters by name, float32."""

HELD_OUT_TOKENS = 32_768
"""Most positions a gate looks at: twice what a paired comparison needs, and still seconds of work."""

WHICH = ("candidate", "served", "initial")


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


class SpotLearner:
    """State: the model on the host, the agreed base, the served and the initial parameters, the buffer, Adam's moments.

    Methods may be called from several threads: the model has one set of weights, so they take turns.

    Args:
        name: of the replica it belongs to.
        config: all settings.
        policy_dir: the policy's Hugging Face directory, visible on this node.
        drafter: the first drafter, float32.
        sampling: the rollout's.
        device: where training runs during a session.
        agreed: for one that replaces another: `agreed()` of a learner that lives on.
        published: for one that replaces another where none lives on: what the engines serve.
    """

    def __init__(
        self,
        name: str,
        config: TLTConfig,
        policy_dir: str,
        drafter: DrafterFile,
        sampling: Sampling,
        device: str,
        agreed: dict[str, Params] | None = None,
        published: DrafterFile | None = None,
    ) -> None:
        self.name, self.config, self.sampling, self.device = name, config, sampling, torch.device(device)
        self._policy_dir = policy_dir
        d, b = config.drafter, config.buffer
        with tempfile.TemporaryDirectory(prefix="verl-tlt-spot-") as directory:
            stage(drafter.config, drafter.weights, Path(directory))
            # Loaded on the host, but trained on the device.
            self.model = load_drafter(directory, policy_dir, attention=default_attention(self.device))
        self.trainer = DrafterTrainer(
            self.model, learning_rate=d.learning_rate, warmup_steps=d.warmup_steps, ttt_steps=d.passes, loss=d.loss
        )
        self.buffer: Buffer[Any] = Buffer(max_bytes=b.max_mb << 20, keep_steps=b.keep_steps, held_out=b.held_out)
        self.base: Params = self.trainer.parameters_numpy()
        self.kept: dict[str, Params] = {"served": dict(self.base), "initial": dict(self.base)}
        self.unmerged_steps = self.unmerged_tokens = 0
        if agreed is not None:
            own = {which: {name: np.array(value) for name, value in params.items()} for which, params in agreed.items()}
            self._start_from(own.pop("candidate"))
            self.kept = own
        elif published is not None:
            tensors = load(published.weights)
            self._start_from({name: tensors[name].float().numpy() for name in self.base})
            self.keep("served")
        self.rng = random.Random(f"{d.seed}-{name}")
        self._busy = threading.Lock()
        self._verifier_known = False
        self._whole_head: torch.Tensor | None = None

    # ------------------------------------------------------------------ buffer

    def add(self, step: int, items: list[dict[str, Any]], parts: dict[str, np.ndarray] | None) -> dict[str, Any]:
        """Take in what was captured in one RL step, and the policy's verifier weights where they have changed.

        Args:
            step: the RL step.
            items: what `tlt_take` describes: {"tokens": int64 [L], "prompt_len", "start", "aux": 16-bit [L, 3H],
                "last": 16-bit [L, H]}.
            parts: fields of `VerifierWeights` in 16 bits; None: as they were.

        Returns:
            Buffer statistics: {"tokens", "bytes", "sequences", ...}.
        """
        with self._busy:
            for index, item in enumerate(items):
                self.buffer.add(
                    step=step,
                    index=index,
                    prompt_len=item["start"] + item["prompt_len"],
                    start=item["start"],
                    length=len(item["tokens"]),
                    nbytes=item["aux"].nbytes + item["last"].nbytes + item["tokens"].nbytes,
                    payload=item,
                )
            if parts:
                self._refresh(parts)
            return self.buffer.stats()

    def _refresh(self, parts: dict[str, np.ndarray]) -> None:
        weights = VerifierWeights(**{k: from_numpy16(v) for k, v in parts.items()})
        refresh_verifier_weights(self.model, weights)
        # A pruned draft vocabulary is judged against the policy's whole head, which the drafter does not hold.
        self._whole_head = weights.lm_head if self.model.use_draft_vocab else None
        self._verifier_known = True

    # ------------------------------------------------------------------ sessions

    def train(self, should_stop: Callable[[], bool]) -> SessionResult:
        """Train until told to stop (asked before each micro-batch), or until the buffer's epochs are used up."""
        result, start = SessionResult(), time.perf_counter()
        if not self._verifier_known or not self.buffer.ready(self.config.buffer.min_tokens):
            result.outcome = "exhausted"
            return result
        with self._busy:
            self.buffer.begin_session(max_epochs=self.config.spot.max_epochs)
            with self._visiting(self.trainer):
                done = train_until(self.trainer, self._batches(), should_stop)
        result.steps, result.tokens, result.skipped = done.steps, done.tokens, done.skipped
        self.unmerged_steps += done.steps
        self.unmerged_tokens += math.ceil(done.weighted_tokens)
        result.epochs = self.buffer.session_epochs()
        result.loss, result.acc = done.loss, list(done.acc_by_position)
        result.outcome = "stopped" if done.stopped else "exhausted"
        result.seconds = time.perf_counter() - start
        return result

    @contextmanager
    def _visiting(self, what: Any) -> Iterator[None]:
        """Model or trainer on the training device for a moment, for whoever holds the lock."""
        what.to(self.device)
        try:
            yield
        finally:
            what.to("cpu")  # the engine maps fixed sizes when it wakes: leave nothing behind
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # it needs all of the memory

    def _batches(self) -> Iterator[Any]:
        while not self.buffer.exhausted():
            windows = self.buffer.sample_batch(self.rng, self.config.drafter.batch_tokens)
            if sequences := [to_sequence(w) for w in windows if w.tokens > 1]:
                yield pack(sequences)

    # ------------------------------------------------------------------ merge

    def contribute(self) -> Contribution:
        """What this learner learned since its last merge."""
        with self._busy:
            return Contribution(self.name, self.unmerged_tokens, self.unmerged_steps, self._own_delta())

    def _own_delta(self) -> Params:
        now = self.trainer.parameters_numpy()
        return {name: now[name] - self.base[name] for name in self.base}

    def adopt(self, merged: Merged) -> None:
        """Move to the new agreed version: base plus the merged delta, on every learner alike.

        One left out for too few steps keeps its own progress on top and hands it in later; one left out for broken
        numbers starts again from the agreed version, with fresh moments: they may be what broke it.
        """
        with self._busy:
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

    def agreed(self) -> dict[str, Params]:
        """What all learners hold alike, for one that joins them: candidate, served and initial parameters."""
        return {"candidate": self.base, **self.kept}

    def keep(self, which: str) -> None:
        """The agreed version is published: remember it as the served one."""
        self.kept[which] = dict(self.base)

    def revert(self, which: str) -> None:
        """Go back to the served or the initial parameters; the candidate is given up."""
        with self._busy:
            self._start_from(self.kept[which])

    # ------------------------------------------------------------------ judging and publishing

    def score(self, max_draft: int) -> dict[str, Any]:
        """Score candidate, served and initial on the held-out sequences, all under the same verifier weights.

        Returns:
            {"positions": int64 [S], which: float64 [S, 1+K] (`trainer.gate.Scores`) for each in `WHICH`}; S may be 0.
        """
        with self._busy:
            sequences = [to_sequence(w) for w in self.buffer.held_out(HELD_OUT_TOKENS) if w.tokens > 1]
            if not self._verifier_known or not sequences:
                return {"positions": []}
            return self._score(sequences, WHICH, max_draft)

    def score_on(self, items: list[dict[str, Any]], which: tuple[str, ...], max_draft: int) -> dict[str, Any]:
        """Score some of `WHICH` on given sequences (`add`'s items) instead of the held-out ones; shapes as `score`."""
        with self._busy:
            whole = [Window(item, 0, len(item["tokens"]), item["start"], item["prompt_len"]) for item in items]
            return self._score([to_sequence(w) for w in whole], which, max_draft)

    def _score(self, sequences: list[Sequence], which: tuple[str, ...], max_draft: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        with self._visiting(self.model):  # without the optimizer: scoring shares the device with the policy
            head = None if self._whole_head is None else self._whole_head.to(self.device)
            for one in which:
                with self._holding(self.base if one == "candidate" else self.kept[one]):
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
                out[one] = np.array([[s.drafts, *s.accepted] for s in scores])
            del head
        return out

    @contextmanager
    def _holding(self, params: Params) -> Iterator[None]:
        """The model with other parameters for a moment, for whoever holds the lock; the learner's own come back."""
        own = self.trainer.parameters_numpy()
        self.trainer.load_parameters(params)
        try:
            yield
        finally:
            self.trainer.load_parameters(own)

    def export(self, version: int, dtype: str, acceptance: list[float]) -> DrafterFile:
        """The agreed version as vLLM loads it."""
        with self._busy, self._holding(self.base):
            config, weights, fingerprint = to_drafter_file(self.model, dtype)
        return DrafterFile(version, config, weights, fingerprint, tuple(acceptance))

    # ------------------------------------------------------------------ checkpoint

    def save(self, directory: str, provenance: dict[str, Any]) -> str:
        """Write the served drafter and the training state atomically under `directory`; returns it.

        Nothing but the copy in memory keeps training, merging or scoring waiting: only what is trained is copied (the
        policy's embedding and head are not), and the disk is written afterwards.
        """
        tensors, state = self.snapshot()
        facts = {**provenance, "steps": state["steps"]}
        save_drafter(self.model, directory, facts, policy=self._policy_dir, training_state=state, tensors=tensors)
        return directory

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(the served drafter's tensors, `DrafterTrainer.state()`), on the host; training does not change them."""
        with self._busy:
            served = self.kept["served"]  # replaced, never written to: no copy is needed
            tensors = serving_tensors(self.model, without=served.keys())
            state = self.trainer.state()  # of the candidate, which may be ahead of what is served
        return tensors | {name: torch.from_numpy(value) for name, value in served.items()}, state

    def resume(self, directory: str) -> bool:
        """Continue candidate, moments and step count from a checkpoint; False where it holds none."""
        state = load_training_state(directory)
        if state is None:
            return False
        with self._busy:
            self.trainer.load_state(state)
            self.base = self.trainer.parameters_numpy()
        return True


def to_sequence(window: Window[Any]) -> Sequence:
    """A buffer window as the drafter's `Sequence`; hidden states are views where the arrays can be written."""
    item, begin, end = window.payload, window.begin, window.end
    return Sequence(
        tokens=torch.from_numpy(item["tokens"][begin:end].copy()),  # [L]; the store's arrays are read-only
        prompt_len=max(0, window.prompt_len - window.start),
        aux=from_numpy16(item["aux"][begin:end]),  # [L, 3H]
        last=from_numpy16(item["last"][begin:end]),  # [L, H]
        start=window.start,
    )
