"""What a spot worker knows and does, without Ray: train, hand in, adopt, judge, export, save.

A learner trains alone on its own buffer and leaves the device empty between sessions: its state lives on the host. What
it learned is a delta against the version all learners agree on; `spot_worker.merge` averages deltas, `trainer.gate`
judges the result. Three sets of parameters are kept besides its own: the agreed one (the candidate), the served and the
initial.

The gate's scores need the device, too, and it is nobody else's in the bubble alone: a session begins with them, for the
version that was agreed on after the sessions before. On the host it is the cores: scored behind log-probs and update, a
version took them from the actor.
"""

from __future__ import annotations

import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    Batch,
    DrafterTrainer,
    SequenceScore,
    TrainingSequence,
    VerifierWeights,
    default_attention,
    from_numpy16,
    halve_frozen,
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
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import (
    AgreedParameters,
    BufferStats,
    Contribution,
    DrafterProvenance,
    HeldOutScores,
    Merged,
    MergedSlice,
    Parameters,
    Resumed,
    RolloutSampling,
    SessionResult,
    VerifierArrays,
)
from verl_tlt.spot_worker.buffer import Buffer
from verl_tlt.spot_worker.device import TrainingDevice
from verl_tlt.spot_worker.merge import facts_of
from verl_tlt.spot_worker.merge_slices import added, hand_in
from verl_tlt.spot_worker.resume import account, go_on, state_of
from verl_tlt.spot_worker.scoring import (
    FEWEST_SEQUENCES,
    HELD_OUT_TOKENS,
    PORTION,
    Judged,
    held_out_scores,
    score_versions,
    tokens_to_judge,
)

WHICH = ("candidate", "served", "initial")


class SpotLearner:
    """State: the model on the host, the agreed base, the served and the initial parameters, the buffer, Adam's moments.

    Methods may be called from several threads: the model has one set of weights, so they take turns. `add` waits for
    nobody's turn, because the trainer waits for it.

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
        sampling: RolloutSampling,
        device: str,
        agreed: AgreedParameters | None = None,
        published: DrafterFile | None = None,
    ) -> None:
        self.name, self.config, self.sampling, self.place = name, config, sampling, TrainingDevice(device)
        self._policy_dir = policy_dir
        d, b = config.drafter, config.buffer
        with tempfile.TemporaryDirectory(prefix="verl-tlt-spot-") as directory:
            stage(drafter.config, drafter.weights, Path(directory))
            # Loaded on the host, but trained on the device.
            self.model = load_drafter(directory, policy_dir, attention=default_attention(device))
            if self.place.is_borrowed:
                halve_frozen(self.model)
        self.trainer = DrafterTrainer(
            self.model, learning_rate=d.learning_rate, warmup_steps=d.warmup_steps, ttt_steps=d.passes, loss=d.loss
        )
        self.buffer = Buffer(max_bytes=b.max_bytes, keep_steps=b.keep_steps, held_out=b.held_out)
        self.base: Parameters = self.trainer.parameters_numpy()
        self.kept: dict[str, Parameters] = {"served": self.base, "initial": self.base}
        self.proposed: Parameters | None = None
        """The agreed version that was exported to be served."""
        self.unjudged = False
        """The agreed version waits for a session that scores it."""
        self._to_judge = HELD_OUT_TOKENS
        self.unmerged_steps = self.unmerged_tokens = 0
        if agreed is not None:
            self._start_from(_copied(agreed.candidate))
            self.kept = {"served": _copied(agreed.served), "initial": _copied(agreed.initial)}
            self.proposed = None if agreed.proposed is None else _copied(agreed.proposed)
        elif published is not None:
            tensors = load(published.weights)
            self._start_from({name: tensors[name].float().numpy() for name in self.base})
            self.keep("served")
        self.rng = random.Random(f"{d.seed}-{name}")
        self._busy = threading.Lock()  # the model
        self._shelf = threading.Lock()  # the buffer; nobody holds it for long
        self._arrived: VerifierArrays | None = None
        self._verifier_known = False
        self._whole_head: torch.Tensor | None = None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The model, for one at a time, with the newest verifier weights."""
        with self._busy:
            self._take_in()
            yield

    # ------------------------------------------------------------------ buffer

    def add(self, step: int, sequences: list[TrainingSequence], verifier_weights: VerifierArrays | None) -> BufferStats:
        """Take in what was captured in one RL step, and the policy's verifier weights where they have changed.

        Args:
            step: the RL step.
            sequences: states in 16 bits; the buffer keeps them.
            verifier_weights: None: as they were.
        """
        with self._shelf:
            for index, sequence in enumerate(sequences):
                self.buffer.add(step, index, sequence)
            stats = self.buffer.stats()
        if verifier_weights is not None:
            self._arrived = verifier_weights
            if self._busy.acquire(blocking=False):  # else the next turn takes them in
                try:
                    self._take_in()
                finally:
                    self._busy.release()
        return stats

    def _take_in(self) -> None:
        """Copy verifier weights that have arrived into the model, for whoever holds the lock."""
        arrays, self._arrived = self._arrived, None
        if arrays is None:
            return
        weights = VerifierWeights(**{part: from_numpy16(array) for part, array in vars(arrays).items()})
        refresh_verifier_weights(self.model, weights)
        # A pruned draft vocabulary is judged against the policy's whole head.
        self._whole_head = weights.lm_head if self.model.use_draft_vocab else None
        self._verifier_known = True

    # ------------------------------------------------------------------ sessions

    def train(self, should_stop: Callable[[], bool]) -> SessionResult:
        """Train until told to stop (asked before each micro-batch), or until the buffer's epochs are used up.

        Raises:
            NoRoom: the device's owners left too little of it.
        """
        start = time.perf_counter()
        with self._turn():
            if not self._verifier_known or not self._begin():
                return SessionResult("exhausted")
            with self._visit(trains=True):
                judged = self._judge(should_stop)
                judged_s = time.perf_counter() - start if judged else 0.0
                done = train_until(self.trainer, self._batches(), should_stop)
            self.unmerged_steps += done.steps
            self.unmerged_tokens += math.ceil(done.weighted_tokens)
        seconds = time.perf_counter() - start
        if judged is not None:
            share = None if judged.scores is None else judged_s / seconds
            self._to_judge = tokens_to_judge(self._to_judge, judged.tokens, share, ran_out=not done.stopped)
        return SessionResult(
            "stopped" if done.stopped else "exhausted",
            steps=done.steps,
            tokens=done.tokens,
            epochs=self.buffer.session_epochs(),
            skipped=done.skipped,
            seconds=seconds,
            loss=done.loss,
            acc=done.acc_by_position,
            scores=None if judged is None else judged.scores,
            judged_s=judged_s,
            slowest_s=done.slowest_s,
        )

    def _begin(self) -> bool:
        """Begin a pass over the buffer; False where there is too little to train on."""
        with self._shelf:
            self.buffer.begin_session(max_epochs=self.config.spot.max_epochs)
            return self.buffer.ready(self.config.buffer.min_tokens)

    def _visit(self, *, trains: bool) -> AbstractContextManager[None]:
        """The drafter on the training device, for whoever holds the lock."""
        return self.place.visit(self.trainer, max(self.config.drafter.rows, PORTION), trains=trains)

    def _batches(self) -> Iterator[Batch]:
        while True:
            with self._shelf:
                if self.buffer.exhausted():
                    return
                drawn = self.buffer.sample_batch(self.rng, self.config.drafter.rows)
            if windows := [window for window in drawn if len(window) > 1]:
                yield pack(windows)

    def warm_up(self) -> None:
        """Have the device do once what a session does, so that no session waits for its kernels; nothing is learned.

        Raises:
            NoRoom: the device's owners left too little of it.
        """
        if self.place.is_borrowed:
            with self._turn(), self._visit(trains=False):
                self.trainer.rehearse()

    # ------------------------------------------------------------------ merge

    def contribute(self) -> Contribution:
        """What this learner learned since its last merge."""
        with self._turn():
            return Contribution(self.name, self.unmerged_tokens, self.unmerged_steps, self._own_delta())

    def hand_in(self, slices: int) -> list[MergedSlice]:
        """The same in slices of 16 bits, for workers on several machines (`spot_worker.merge_slices`)."""
        with self._turn():
            facts = facts_of(self.name, self.unmerged_tokens, self.unmerged_steps, self.config.spot.min_merge_steps)
            return hand_in(facts, self._live(), self.base, slices)

    def _own_delta(self) -> Parameters:
        now = self.trainer.parameters_numpy()
        return {name: now[name] - self.base[name] for name in self.base}

    def adopt(self, merged: Merged) -> None:
        """Move to the new agreed version: base plus the merged delta, on every learner alike."""
        with self._turn():
            delta = merged.delta
            agreed = self.base if delta is None else {name: value + delta[name] for name, value in self.base.items()}
            self._move_to(agreed, self.name in merged.included)

    def adopt_slices(self, slices: tuple[MergedSlice, ...]) -> None:
        """The same, of a merge in slices."""
        with self._turn():
            if self.name not in slices[0].facts.included:
                self._move_to(added(self.base, slices), included=False)
                return
            self.base = added(self.base, slices, self._live())
            self.unjudged = True
            self.unmerged_steps = self.unmerged_tokens = 0

    def _live(self) -> Parameters:
        """The trainer's parameters themselves, for whoever holds the lock: between sessions they are on the host."""
        return {name: p.data.numpy() for name, p in self.trainer.parameters.items()}

    def _move_to(self, agreed: Parameters, included: bool) -> None:
        """One left out for too few steps keeps its own progress on top and hands it in later; one left out for broken
        numbers starts again from the agreed version, with fresh moments: they may be what broke it.
        """
        own = {} if included else self._own_delta()
        sound = all(np.isfinite(v).all() for v in own.values())
        if agreed is not self.base:
            self.unjudged = True
        if sound and not included:
            self.base = agreed
            self.trainer.load_parameters({name: agreed[name] + own[name] for name in own})
            return
        self._start_from(agreed)
        if not sound:
            self.trainer.optimizer.state.clear()
            self.trainer.steps = 0  # warm up again

    def _start_from(self, params: Parameters) -> None:
        self.base = params
        self.trainer.load_parameters(self.base)
        self.unmerged_steps = self.unmerged_tokens = 0

    def agreed(self) -> AgreedParameters:
        """What all learners hold alike, for one that joins them."""
        return AgreedParameters(self.base, self.kept["served"], self.kept["initial"], self.proposed)

    def propose(self) -> None:
        """The agreed version is about to be published, and may be another one when it is."""
        self.proposed = self.base  # replaced by the next version, never written to

    def keep(self, which: str) -> None:
        """What was proposed is published, or else the agreed version: remember it as the served one."""
        self.kept[which] = self.base if self.proposed is None else self.proposed
        self.unjudged = self.unjudged and self.kept[which] is not self.base
        self.proposed = None

    def revert(self, which: str) -> None:
        """Go back to the served or the initial parameters; the candidate is given up."""
        with self._turn():
            self._start_from(self.kept[which])
            self.unjudged, self.proposed = False, None

    # ------------------------------------------------------------------ judging and publishing

    def _judge(self, should_stop: Callable[[], bool]) -> Judged | None:
        """Score the agreed version where it has to be; for whoever holds the lock, on the device."""
        if not self.unjudged:
            return None
        sequences = self._held_out(self._to_judge)
        scores = self._score_held_out(sequences, self.config.speculation.longest, should_stop)
        self.unjudged = scores is None
        return Judged(sum(map(len, sequences)), scores)

    def _held_out(self, tokens: int) -> list[TrainingSequence]:
        with self._shelf:
            held_out = self.buffer.held_out(tokens, FEWEST_SEQUENCES) if self._verifier_known else []
        return [s for s in held_out if len(s) > 1]

    def _score_held_out(
        self, sequences: list[TrainingSequence], max_draft: int, should_stop: Callable[[], bool]
    ) -> HeldOutScores | None:
        """Candidate, served and initial under the same verifier weights; None when told to stop."""
        scores = self._score(sequences, WHICH, max_draft, should_stop)
        if scores is None:
            return None
        return held_out_scores(scores, max_draft, finite=all(np.isfinite(value).all() for value in self.base.values()))

    def score(self, max_draft: int) -> HeldOutScores | None:
        """The gate's scores at once, not in a session; for studies, which own their device."""
        with self._turn(), self._visit(trains=False):
            return self._score_held_out(self._held_out(HELD_OUT_TOKENS), max_draft, lambda: False)

    def score_on(
        self, sequences: list[TrainingSequence], which: Iterable[str], max_draft: int
    ) -> dict[str, list[SequenceScore]]:
        """Score some of `WHICH` on any sequences; for studies, which own their device."""
        with self._turn(), self._visit(trains=False) if sequences else nullcontext():
            return self._score(sequences, which, max_draft, lambda: False) or {}

    def _score(
        self, sequences: list[TrainingSequence], which: Iterable[str], max_draft: int, should_stop: Callable[[], bool]
    ) -> dict[str, list[SequenceScore]] | None:
        head = None if self._whole_head is None else self._whole_head.to(self.place.device)
        versions = {one: self.agreed().of(one) for one in which}
        rows = self.config.drafter.rows
        return score_versions(self.trainer, versions, sequences, self.sampling, max_draft, head, should_stop, rows)

    def export(self, version: int, dtype: str, acceptance: list[float]) -> DrafterFile:
        """The agreed version as vLLM loads it; a `DrafterError` where its numbers are not finite in that dtype."""
        with self._turn(), self.trainer.holding(self.base):
            config, weights, fingerprint = to_drafter_file(self.model, dtype)
        return DrafterFile(version, config, weights, fingerprint, tuple(acceptance))

    # ------------------------------------------------------------------ checkpoint

    def save(self, directory: str, provenance: DrafterProvenance) -> None:
        """Write the served drafter and the training state atomically under `directory`.

        Nothing but the copy in memory keeps training, merging or scoring waiting: only what is trained is copied (the
        policy's embedding and head are not), and the disk is written afterwards.
        """
        tensors, state = self.snapshot()
        facts = {**asdict(provenance), "steps": state["steps"]}
        save_drafter(self.model, directory, facts, policy=self._policy_dir, training_state=state, tensors=tensors)

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(the served drafter's tensors, what `resume` needs), on the host; training does not change them."""
        with self._turn():
            served = self.kept["served"]  # replaced, never written to: no copy is needed
            tensors = serving_tensors(self.model, without=served.keys())
            state = state_of(self.trainer, self.kept)  # of the candidate, which may be ahead of what is served
        return tensors | {name: torch.from_numpy(value) for name, value in served.items()}, state

    def resume(self, directory: str) -> Resumed | None:
        """Continue candidate, moments, steps and the gate's initial drafter; None where a checkpoint holds none."""
        if (state := load_training_state(directory)) is None:
            return None
        with self._turn():
            self.base = go_on(self.trainer, self.kept, state)
            return account(self.trainer, self.kept)


def _copied(params: Parameters) -> Parameters:
    """On memory of their own: what came through the object store is read-only and keeps the whole object there."""
    return {name: np.array(value) for name, value in params.items()}
