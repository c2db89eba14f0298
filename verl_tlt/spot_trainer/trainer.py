"""What the spot trainer does, without Ray: it keeps hidden states, trains the drafter, judges it, exports and saves it.

The drafter has up to three versions. The *served* one is what engines draft with, the *initial* one is what the run
started with, and the *candidate* is the average of the trained weights at the end of the last session. A session begins
with scoring the candidate, because scores need the training device.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load
from torch.utils._pytree import tree_leaves

from verl_tlt.drafter import (
    Batch,
    DrafterTrainer,
    TrainingSequence,
    VerifierWeights,
    choose_tokens,
    default_attention,
    from_drafter_file,
    from_numpy16,
    halve_frozen,
    load_training_state,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
    to_drafter_file,
    train_until,
)
from verl_tlt.drafter.memory import NoRoomError, TrainingDevice
from verl_tlt.drafter.tensor_file import not_finite
from verl_tlt.errors import DrafterError
from verl_tlt.files.disk import free_bytes
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import (
    BufferStats,
    DrafterProvenance,
    SessionResult,
    SpotPlan,
    Verdict,
    VerifierArrays,
)
from verl_tlt.spot_trainer.buffer import Buffer
from verl_tlt.spot_trainer.gate import MOST_POSITIONS, TRAINED_PER_SCORED, decide, positions_to_score, undecidable
from verl_tlt.spot_trainer.scoring import PORTION, Parameters, Scoring, prompt_of

logger = logging.getLogger(__name__)

INITIAL = "initial"
"""Key of the initial parameters in a checkpoint's training state; absent where they are the served ones."""
HELD_OUT_PROMPTS = 8
"""Fewest prompts to score, however long their sequences: the gate judges by no fewer than `gate.MIN_PROMPTS`."""


class SpotTrainer:
    """The run's drafter, its optimizer and its data. Methods are called one after the other, from one thread.

    With `published` it replaces one that failed, and goes on from this drafter; `draft_ids`, int64 [DV], are the tokens
    that the run has chosen to draft.
    """

    def __init__(
        self, plan: SpotPlan, published: DrafterFile | None = None, draft_ids: np.ndarray | None = None
    ) -> None:
        self.plan = replace(plan, drafter=replace(plan.drafter, weights=b""))  # gigabytes that are read once
        self.place = TrainingDevice(plan.device)
        self.model = from_drafter_file(plan.drafter.config, plan.drafter.weights, default_attention(plan.device))
        if draft_ids is not None:
            choose_tokens(self.model, torch.tensor(draft_ids))
        if self.place.is_accelerator:
            halve_frozen(self.model)
        self.trainer = DrafterTrainer(
            self.model,
            learning_rate=plan.learning_rate,
            warmup_steps=plan.warmup_steps,
            trained=published is not None or not plan.drafter.untrained,
        )
        self.buffer = Buffer(max_bytes=plan.buffer_bytes, held_out=plan.held_out if plan.gate else 0.0)
        self.initial: Parameters = self.trainer.cloned_parameters()
        self.served: Parameters = self.initial
        self._candidate: Parameters | None = self.served
        self.version = plan.drafter.version
        """Number of publications so far."""
        self._scoring: Scoring | None = None
        self._judged = True  # the candidate was judged, or it is the served drafter
        self._approved: Parameters | None = None  # what `export` publishes
        self._acceptance: tuple[float, ...] = ()  # held-out acceptance of `_approved`; empty: unknown
        self._exported: DrafterFile | None = None  # the last one, without its weights
        self._trained_positions = 0  # since the candidate before this one was judged
        self._sessions = 0
        self.whole_head: torch.Tensor | None = None
        """The policy's head: a pruned draft vocabulary has some of its rows, and is judged by all of them."""
        self._verifier_known = False
        if plan.checkpoint is not None:
            self._resume(plan.checkpoint)
        if published is not None:
            self._go_on_from(published)
        self.place.receive(self.trainer)

    @property
    def candidate(self) -> Parameters:
        """What the last session trained; it is copied when it is first needed, since a stop must not wait for that."""
        if self._candidate is None:
            averages = self.trainer.averages()
            self._candidate = {name: average.to("cpu", copy=True) for name, average in averages.items()}
        return self._candidate

    # ------------------------------------------------------------------ data

    def add(
        self,
        step: int,
        sequences: list[TrainingSequence],
        verifier_weights: VerifierArrays | None = None,
        draft_ids: np.ndarray | None = None,
    ) -> BufferStats:
        """Keep what was captured in one RL step; take over verifier weights and draft vocabulary, if there are any."""
        chosen = False
        if draft_ids is not None:
            chosen = choose_tokens(self.model, torch.tensor(draft_ids))
        if verifier_weights is not None:
            arrays = vars(verifier_weights).items()
            self._take_over(VerifierWeights(**{part: from_numpy16(array) for part, array in arrays}))
        elif not self._verifier_known or chosen:  # under LoRA no weight sync brings them, and they never change
            self._take_over(VerifierWeights.from_policy_dir(self.plan.policy_dir))
        for sequence in sequences:
            self.buffer.add(step, sequence)
        return self._stats(sequences)

    def _take_over(self, weights: VerifierWeights) -> None:
        refresh_verifier_weights(self.model, weights)
        if self.model.use_draft_vocab:
            self.whole_head = self.place.hold(weights.lm_head)
        self._verifier_known = True

    def _stats(self, sequences: list[TrainingSequence]) -> BufferStats:
        stats = BufferStats(self.buffer.train_tokens)
        if not self.model.use_draft_vocab or not sequences:
            return stats
        turns = [sequence.tokens[turn.start : turn.stop] for sequence in sequences for turn in sequence.turns]
        responses = torch.cat([*turns, torch.empty(0, dtype=torch.int64)])
        draftable = int(self.model.t2d.cpu()[responses].sum())
        return replace(stats, responses=len(responses), draftable=draftable)

    # ------------------------------------------------------------------ a session

    def train(self, device: int, should_stop: Callable[[], bool]) -> SessionResult:
        """One session on the GPU of this number: score the candidate if it was not, then train until told to stop.

        It begins after `add`, when the RL trainer says that there are enough tokens (`SpotTrainerHandle.ready`).
        `should_stop` is asked before each micro-batch and each scored portion. It also ends when the epochs over the
        buffer are used up. It fails, and nothing is lost, where the device has too little free memory.
        """
        assert self._verifier_known, "a session begins after `add`"
        start = time.perf_counter()
        self._sessions += 1
        self.buffer.begin_session(self.plan.max_epochs)
        try:
            with self.place.at(device):
                scored_rows = max(PORTION, self.plan.window)  # a scored sequence stays whole
                rows = self.place.rows(self.trainer, self.plan.batch_tokens, scored_rows)
                with self.place.resident(self.trainer, rows, scored_rows):
                    settled = self._judged or self._approved is not None  # the next one is compared with this one
                    verdict = None if settled else self._judge(rows, should_stop)
                    done = train_until(self.trainer, self._batches(rows), should_stop)
        except NoRoomError as error:
            return SessionResult("failed", error=str(error))
        if done.steps > 0:
            self._trained_positions += done.tokens
            if self._scoring is None:  # a candidate that is scored in part stays the candidate
                self._judged = False
                self._candidate = None  # copied from what was trained when it is first needed
                if not self.plan.gate:
                    verdict = self._publish_unjudged("the gate is off")
        return SessionResult(
            outcome="stopped" if done.stopped else "exhausted",
            steps=done.steps,
            tokens=done.tokens,
            skipped=done.skipped,
            seconds=time.perf_counter() - start,
            loss=done.loss,
            verdict=verdict,
        )

    def _batches(self, rows: int) -> Iterator[Batch]:
        """A session's micro-batches, drawn ahead of the step in a thread."""
        rng = random.Random(self._sessions)
        while not self.buffer.exhausted() and (drawn := self.buffer.sample_batch(rng, rows)):
            yield self.place.packed(drawn)

    # ------------------------------------------------------------------ judging and publishing

    def _judge(self, rows: int, should_stop: Callable[[], bool]) -> Verdict | None:
        """Score the candidate, which is on the device, and carry out the gate's verdict; None: a stop came first."""
        if self._scoring is None:
            if not_finite(self.trainer.averages()) is not None:  # drafts of such a drafter may still be counted
                return self._give_up("the candidate's weights are not finite")
            most = positions_to_score(self._trained_positions, self.plan.max_draft)
            sequences = self.buffer.held_out(most, HELD_OUT_PROMPTS, self.plan.max_draft)
            if not sequences:
                if self.plan.drafter.untrained and self.version == 0:
                    return self._publish_unjudged("not judged: the served drafter is a random head")
                return Verdict(reason="no held-out sequences yet")
            positions = sum(sequence.positions(self.plan.max_draft) for sequence in sequences)
            prompts = len({prompt_of(sequence) for sequence in sequences})
            if kept := undecidable(positions, prompts, self._served_accept_length()):
                return kept
            versions = {"candidate": self.candidate, "served": self.served, "initial": self.initial}
            self._scoring = Scoring(versions, self.plan.sampling, self.plan.max_draft, sequences)  # type: ignore[arg-type]
        head = self.whole_head
        if head is not None:
            head = head.to(self.place.device, non_blocking=True)
        scores = self._scoring.run(self.trainer, rows, head, should_stop)
        if scores is None:
            return None
        self._scoring = None
        self._note_judged()
        verdict = decide(scores, seed=self.version + 1)
        if verdict.decision == "reverted":
            self._return_to(self.initial if verdict.publishes else self.served)
        if verdict.publishes:
            self._approved = self.candidate  # the initial drafter, if the gate has just returned to it
            self._acceptance = verdict.acceptance
        return verdict

    def _served_accept_length(self) -> float:
        """The served drafter's held-out accept length when it was published; 1 if it is not known."""
        served = self._exported or self.plan.drafter
        return 1.0 + float(np.cumprod(served.acceptance).sum())

    def _note_judged(self) -> None:
        self._judged = True
        self._trained_positions = 0

    def _give_up(self, reason: str) -> Verdict:
        """Return to the served drafter, with a fresh optimizer."""
        self._note_judged()
        self._return_to(self.served)
        self.trainer.start_over()  # its moments may be what broke the candidate
        return Verdict(decision="reverted", reason=reason)

    def _publish_unjudged(self, reason: str) -> Verdict:
        """Approve the candidate without scores."""
        self._note_judged()
        self._approved = self.candidate
        self._acceptance = ()
        return Verdict(decision="published", reason=reason, publishes=True)

    def _return_to(self, parameters: Parameters) -> None:
        """Give the candidate up, and what was trained on top of it."""
        self._candidate = parameters
        self.trainer.load_parameters(parameters)

    def export(self) -> DrafterFile | None:
        """The drafter that is to be published, as vLLM loads it; it counts as served from here on.

        None where its numbers are not finite in the rollout's dtype: the candidate is then given up. None also where
        nothing is to be published, as in a spot trainer that replaced the one that had the candidate.
        """
        approved = self._approved
        self._approved = None
        if approved is None:
            return None
        try:
            with self.trainer.holding(approved):
                config, weights = to_drafter_file(self.model, self.plan.dtype)
        except DrafterError as error:
            logger.error("%s", error)
            self._give_up(str(error))
            return None
        self.served = approved
        self.version += 1
        self._exported = DrafterFile(self.version, config, b"", self._acceptance)
        return replace(self._exported, weights=weights)

    # ------------------------------------------------------------------ checkpoints

    def save(
        self, directory: str, provenance: DrafterProvenance, step: str | None = None, rotates: bool = False
    ) -> None:
        """Write the served drafter with the training state, so that `directory` is complete or as it was before.

        A `DrafterError`, and no file, where `check_room` says that the disk is too small for the policy's checkpoint in
        `step` and the drafter; None: there is no policy to write.
        """
        if not self._verifier_known and self.model.use_draft_vocab:  # a pruned drafter brings rows of the policy's head
            self._take_over(VerifierWeights.from_policy_dir(self.plan.policy_dir))
        tensors = serving_tensors(self.model, without=self.served.keys())
        tensors |= self.served
        state = self.trainer.state()  # of the candidate, which may be ahead of what is served
        if self.initial is not self.served:
            state[INITIAL] = self.initial
        if step is not None:
            leaves = tree_leaves([tensors, state])
            check_room(Path(step), sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)), rotates)
        facts = {**asdict(provenance), "steps": state["steps"]}
        if self._exported is not None and self._exported.version > provenance.version:  # the RL trainer has yet to hear
            facts |= {"version": self._exported.version, "acceptance": self._exported.acceptance}
        save_drafter(self.model, directory, facts, policy=self.plan.policy_dir, training_state=state, tensors=tensors)

    def _resume(self, directory: str) -> None:
        """Go on from a checkpoint with its candidate, moments, steps and initial drafter, if it holds any."""
        try:
            state = load_training_state(directory)
            if state is None:
                logger.info("the spot trainer starts anew: %s holds no training state", directory)
                return
            self.trainer.load_state(state, beside=INITIAL)
        except DrafterError as error:
            logger.warning("the spot trainer starts with a fresh optimizer: %s", error)
            return
        if INITIAL in state:
            self.initial = {name: value.float() for name, value in state[INITIAL].items()}
        self._candidate = None
        self._judged = all(torch.equal(value, self.served[name]) for name, value in self.candidate.items())
        self._trained_positions = MOST_POSITIONS * TRAINED_PER_SCORED  # unknown; a full verdict
        logger.info("the spot trainer goes on from %s after %d optimizer steps", directory, self.trainer.steps)

    def _go_on_from(self, published: DrafterFile) -> None:
        """Replace another spot trainer: go on from what it published last, with the moments of the last checkpoint."""
        tensors = load(published.weights)
        self.served = {name: tensors[name].float() for name in self.initial}
        self._return_to(self.served)
        self._judged = True
        self._exported = replace(published, weights=b"")
        self.version = published.version

    def rehearse(self) -> None:
        """Run a forward and a backward pass, so that no session waits for kernels to be tuned; nothing is learned."""
        if not self.place.is_accelerator:
            return
        scored = max(PORTION, self.plan.window)
        try:
            with self.place.at(0):
                rows = self.place.rows(self.trainer, self.plan.batch_tokens, scored)
                with self.place.resident(self.trainer, rows, scored, trains=False):
                    self.trainer.rehearse(rows)
        except NoRoomError as error:
            logger.warning("no kernel is tuned before the run: %s", error)


def check_room(step: Path, needed: int, rotates: bool) -> None:
    """Raise a `DrafterError` where the disk cannot take `needed` bytes, and then the policy's next checkpoint.

    `step` is the present checkpoint. verl may still be writing its policy (`async_save`), which is then expected to
    become as large as the one before it. `rotates`: verl removes an older checkpoint before it writes the next one.
    """
    free = free_bytes(step)
    if free is None:
        return
    written = _policy_bytes(step)
    policy = written
    before = [path for path in step.parent.glob("global_step_*") if _in_order(path) < _in_order(step)]
    if before:
        policy = max(policy, _policy_bytes(max(before, key=_in_order)))
    next_one = 0 if rotates else policy
    coming = (policy - written) + next_one
    if free < needed + coming:
        raise DrafterError(
            f"{step} gets no drafter: the disk has {free / 1e9:.3f} GB left, the drafter takes {needed / 1e9:.3f} GB, "
            f"and the policy's checkpoints {coming / 1e9:.3f} GB more."
        )


def _in_order(step: Path) -> tuple[int, str]:
    """Key that sorts checkpoints `global_step_N` by N."""
    return len(step.name), step.name


def _policy_bytes(step: Path) -> int:
    """Bytes of a checkpoint without its drafter; a file that cannot be read counts as nothing."""
    total = 0
    for folder, folders, files in os.walk(step):
        folders[:] = [name for name in folders if "tlt_drafter" not in name]
        for name in files:
            with suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total
