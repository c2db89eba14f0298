"""What a spot worker does, without Ray: train a drafter, take part in merges, score, export and save it.

What a learner has learned is the average of its recent weights less the candidate that all learners agree on. The
gate's scores need the training device, so a session begins with them, for the candidate merged before it.
"""

import math
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load
from torch.utils._pytree import tree_leaves

from verl_tlt.config import TLTConfig
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
    pack,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
    to_drafter_file,
    train_until,
)
from verl_tlt.drafter.data import grouped
from verl_tlt.drafter.memory import TrainingDevice
from verl_tlt.errors import DrafterError
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import (
    VERSIONS,
    BufferStats,
    DrafterProvenance,
    HeldOutScores,
    MergedSlice,
    Parameters,
    Resumed,
    RolloutSampling,
    SessionResult,
    VerifierArrays,
)
from verl_tlt.spot_worker.buffer import (
    CPU_TOKENS,
    FEWEST_PROMPTS,
    HELD_OUT_TOKENS,
    KEPT_TOKENS,
    PORTION,
    Buffer,
    Judging,
    score_versions,
    tokens_to_judge,
)
from verl_tlt.spot_worker.merge import INITIAL, DrafterVersions, added, checksums, hand_in, session_facts


class SpotLearner:
    """The model on the host, the versions all learners agree on, the buffer, and the optimizer's moments.

    Methods may be called from several threads and take turns; `add` does not wait for its turn, because the trainer
    waits for it. One that replaces another gets the `versions` of a learner that lives on, or else what the engines
    serve (`published`), and the tokens that the run has chosen to draft (`draft_ids`).
    """

    def __init__(
        self,
        name: str,
        config: TLTConfig,
        policy_dir: str,
        drafter: DrafterFile,
        sampling: RolloutSampling,
        device: str,
        versions: DrafterVersions | None = None,
        published: DrafterFile | None = None,
        draft_ids: np.ndarray | None = None,
    ) -> None:
        self.name, self.config, self.sampling, self.training_device = name, config, sampling, TrainingDevice(device)
        self._policy_dir = policy_dir
        d, b = config.drafter, config.buffer
        self.model = from_drafter_file(drafter.config, drafter.weights, default_attention(device))
        if self.training_device.is_accelerator:
            halve_frozen(self.model)
        new = drafter.untrained and published is None and versions is None
        self.trainer = DrafterTrainer(
            self.model, learning_rate=d.learning_rate, warmup_steps=d.warmup_steps, ttt_steps=d.passes, loss=d.loss,
            trained=not new,
        )  # fmt: skip
        self.buffer = Buffer(max_bytes=b.max_bytes, keep_steps=b.keep_steps, held_out=b.held_out_share)
        initial = served = self.trainer.parameters_numpy()
        if published is not None:
            tensors = load(published.weights)
            served = {name: tensors[name].float().numpy() for name in initial}
        self.versions = DrafterVersions(served, served, initial) if versions is None else versions.copied()
        self._start_from_candidate()
        self._to_judge = HELD_OUT_TOKENS
        self._judging: Judging | None = None
        self.rng = random.Random(f"{d.seed}-{name}")
        self._model_lock = threading.Lock()
        self._buffer_lock = threading.Lock()  # held for moments only
        self._versions_lock = threading.Lock()  # held for moments only
        self._arrived: VerifierArrays | None = None
        self._chosen = draft_ids  # has arrived; None: nothing to take over
        self._verifier_known = False
        self.whole_head: torch.Tensor | None = None
        """The policy's head: a pruned draft vocabulary has some of its rows, and is judged by all of them."""
        self._load_arrived()
        self.training_device.receive(self.trainer)

    def _transition(self, event: Callable[[DrafterVersions], DrafterVersions]) -> None:
        """Apply an event; some come while a session runs in another thread."""
        with self._versions_lock:
            self.versions = event(self.versions)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The model, for one thread at a time, with the newest verifier weights."""
        with self._model_lock:
            self._load_arrived()
            yield

    # ------------------------------------------------------------------ what the actors hand over

    def add(
        self,
        step: int,
        sequences: list[TrainingSequence],
        verifier_weights: VerifierArrays | None,
        draft_ids: np.ndarray | None = None,
    ) -> BufferStats:
        """Keep what was captured in one RL step; take over verifier weights and draft vocabulary, None: as before."""
        with self._buffer_lock:
            for index, sequence in enumerate(sequences):
                self.buffer.add(step, index, sequence)
            stats = self.buffer.stats()
        if verifier_weights is not None:
            self._arrived = verifier_weights
        if draft_ids is not None:
            self._chosen = draft_ids
        if self._model_lock.acquire(blocking=False):  # else the next turn loads them
            try:
                self._load_arrived()
            finally:
                self._model_lock.release()
        if self._draftable is None or not sequences:
            return stats
        responses = torch.cat([sequence.tokens[sequence.prompt_len :] for sequence in sequences])
        return replace(stats, responses=len(responses), draftable=int(self._draftable[responses].sum()))

    def _load_arrived(self) -> None:
        """Take over a draft vocabulary and verifier weights that have arrived; only during a turn."""
        arrays, self._arrived = self._arrived, None
        ids, self._chosen = self._chosen, None
        model = self.model
        cut = ids is not None and choose_tokens(model, torch.tensor(ids))
        pruned = model.use_draft_vocab
        self._draftable = model.t2d.cpu().clone() if pruned else None  # [V]; a session moves the model's own
        if arrays is not None:
            weights = VerifierWeights(**{part: from_numpy16(array) for part, array in vars(arrays).items()})
        elif cut and self.whole_head is not None:  # the drafter has the other two in full
            weights = VerifierWeights(model.embed_tokens.weight, self.whole_head, model.verifier_norm.weight)
        else:
            return
        refresh_verifier_weights(model, weights)
        if pruned:
            self.whole_head = self.training_device.hold(weights.lm_head)
        self._verifier_known = True

    # ------------------------------------------------------------------ sessions

    def train(self, should_stop: Callable[[], bool]) -> SessionResult:
        """One session: score the candidate if it was not yet, then train until told to stop or out of epochs.

        `should_stop` is asked before each micro-batch and each scored portion. A `TLTError` where memory is short.
        """
        start = time.perf_counter()
        scores, judged_s = None, 0.0
        with self._turn():
            with self._buffer_lock:
                self.buffer.begin_session(max_epochs=self.config.spot.max_epochs)
                ready = self.buffer.ready(self.config.buffer.min_tokens)
                sequences = self.buffer.held_out(self._to_judge, FEWEST_PROMPTS) if self.versions.to_judge else None
            if not ready or not self._verifier_known:
                return SessionResult("exhausted")
            rows, scored = self._rows()
            with self.training_device.resident(self.trainer, rows, scored):
                if sequences is not None:
                    scores = self._score_held_out(sequences, self.config.speculation.longest, should_stop)
                    judged_s = time.perf_counter() - start
                epochs = [0.0]
                batches = self._batches(random.Random(self.rng.getrandbits(64)), rows, epochs)
                done = train_until(self.trainer, batches, should_stop)
            self.unmerged_steps += done.steps
            self.unmerged_tokens += math.ceil(done.weighted_tokens)
            if scores is not None:
                self._transition(DrafterVersions.judged)
        seconds = time.perf_counter() - start
        if sequences is not None:
            self._spent(judged_s, seconds, sum(map(len, sequences)), scores is not None, ran_out=not done.stopped)
        outcome: Literal["stopped", "exhausted"] = "stopped" if done.stopped else "exhausted"
        common = {name: getattr(done, name) for name in ("steps", "tokens", "skipped", "loss", "slowest_s")}
        epoch = epochs[done.batches]
        return SessionResult(outcome, epochs=epoch, seconds=seconds, judged_s=judged_s, scores=scores, **common)

    def _rows(self) -> tuple[int, int]:
        """Most rows of a batch that is trained, and of one that is scored, whose sequences are whole."""
        scored = max(PORTION, self.config.buffer.window)
        return self.training_device.rows(self.trainer, self.config.drafter.rows, scored), scored

    def _batches(self, rng: random.Random, rows: int, epochs: list[float]) -> Iterator[Batch]:
        """A session's micro-batches, drawn ahead of the step by its own `rng`; `epochs` gets what each completes."""
        while True:
            with self._buffer_lock:
                drawn = [] if self.buffer.exhausted() else self.buffer.sample_batch(rng, rows)
                epochs.append(self.buffer.epochs)
            if not drawn:
                return
            yield pack(drawn, pinned=True) if self.training_device.device.type == "cuda" else pack(drawn)

    def warm_up(self) -> None:
        """Have the device do once what a session does, so that no session waits for its kernels; nothing is learned."""
        if self.training_device.is_accelerator:
            with self._turn():
                rows, scored = self._rows()
                with self.training_device.resident(self.trainer, rows, scored, trains=False):
                    self.trainer.rehearse(rows)

    # ------------------------------------------------------------------ merge

    def hand_in(self, slices: int) -> list[MergedSlice]:
        """What this learner learned since its last merge, in slices of 16 bits (`spot_worker.merge`)."""
        with self._turn():
            least = self.config.spot.min_merge_steps
            facts = session_facts(self.name, self.unmerged_tokens, self.unmerged_steps, least)
            return hand_in(facts, self._average(), self.versions.candidate, slices)

    def adopt(self, *slices: MergedSlice) -> None:
        """Move to the new candidate; a learner that is not in it keeps its own progress on top, if that is sound."""
        with self._turn():
            facts, base = slices[0].facts, self.versions.candidate
            candidate = added(base, slices)
            if facts.included:
                self._transition(lambda versions: versions.merged(candidate))
            if self.name in facts.included:
                self.trainer.move_average(candidate)
                self.unmerged_steps = self.unmerged_tokens = 0
                return
            changes = {name: value - base[name] for name, value in self._average().items()}
            if all(np.isfinite(change).all() for change in changes.values()):  # left out for too few steps
                self.trainer.move_average({name: candidate[name] + change for name, change in changes.items()})
            else:
                self._start_from_candidate()
                self.trainer.start_over()  # its moments may be what broke it

    def _average(self) -> Parameters:
        """The average of the recent weights, not a copy; only during a turn: between sessions it is on the host."""
        return {name: average.numpy() for name, average in self.trainer.averages().items()}

    def _start_from_candidate(self) -> None:
        self.trainer.load_parameters(self.versions.candidate)
        self.unmerged_steps = self.unmerged_tokens = 0

    def mark_exported(self) -> None:
        self._transition(DrafterVersions.export)

    def mark_published(self) -> None:
        self._transition(DrafterVersions.published)

    def revert(self, which: Literal["served", "initial"]) -> None:
        with self._turn():
            self._transition(lambda versions: versions.reverted(which))
            self._start_from_candidate()

    # ------------------------------------------------------------------ judging and publishing

    def _score_held_out(
        self, sequences: list[TrainingSequence], max_draft: int, should_stop: Callable[[], bool]
    ) -> HeldOutScores | None:
        """Score candidate, served and initial drafter on all of these, or as many before; None when told to stop."""
        head = None if self.whole_head is None else self.whole_head.to(self.training_device.device, non_blocking=True)
        versions, rows = {which: self.versions.of(which) for which in VERSIONS}, self.config.drafter.rows
        if self._judging is None or any(self._judging.versions[which] is not versions[which] for which in VERSIONS):
            self._judging = Judging(versions)
        kept = KEPT_TOKENS if self.training_device.is_accelerator else min(rows, CPU_TOKENS)
        arguments = (self.sampling, max_draft, head, should_stop, min(rows, kept))
        for portion in grouped(self._judging.new(sequences), len, kept):
            if self._judging.enough(sequences):
                break
            scores = score_versions(self.trainer, versions, portion, *arguments)
            if scores is None:
                return None
            self._judging.add(portion, scores)
        return self._judging.combined(max_draft)

    def _spent(self, judged_s: float, seconds: float, tokens: int, scored: bool, ran_out: bool) -> None:
        """Note what a session took to score, and how much the next one is to look at."""
        assert self._judging is not None
        self._judging.judged_s += judged_s
        self._judging.seconds += seconds
        share = self._judging.judged_s / self._judging.seconds if scored else None
        self._to_judge = tokens_to_judge(self._to_judge, tokens, share, ran_out=ran_out)
        if scored:
            self._judging = None

    def export(self, version: int, dtype: str, acceptance: list[float]) -> DrafterFile:
        """The candidate as vLLM loads it; a `DrafterError` where its numbers are not finite in that dtype."""
        with self._turn(), self.trainer.holding(self.versions.candidate):
            config, weights = to_drafter_file(self.model, dtype)
        return DrafterFile(version, config, weights, tuple(acceptance))

    # ------------------------------------------------------------------ checkpoint

    def save(self, directory: str, provenance: DrafterProvenance, *places: str) -> None:
        """Write the served drafter and the training state; others wait for the copy in memory, not for the disk.

        A `DrafterError`, and no file, where `check_room` of these `places`, if any, says that the disk is too small.
        """
        tensors, state = self.snapshot()
        if places:
            needed = sum(leaf.nbytes for leaf in tree_leaves([tensors, state]) if isinstance(leaf, torch.Tensor))
            checkpoint, *leaves = map(Path, places)
            check_room(checkpoint, Path(directory).name, needed, *leaves)
        facts = {**asdict(provenance), "steps": state["steps"]}
        save_drafter(self.model, directory, facts, policy=self._policy_dir, training_state=state, tensors=tensors)

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict]:
        """(the served drafter's tensors, what `resume` needs), on the host; training does not change them."""
        with self._turn():
            if self.model.use_draft_vocab and not self._verifier_known:  # it has just replaced another
                refresh_verifier_weights(self.model, VerifierWeights.from_policy_dir(self._policy_dir))
            served = self.versions.served  # replaced, never written to: no copy is needed
            tensors = serving_tensors(self.model, without=served.keys())
            state = self.trainer.state()  # of the candidate, which may be ahead of what is served
            if (initial := self.versions.initial) is not served:
                state[INITIAL] = {name: torch.from_numpy(value) for name, value in initial.items()}
        return tensors | {name: torch.from_numpy(value) for name, value in served.items()}, state

    def resume(self, directory: str) -> Resumed | None:
        """Continue candidate, moments, steps and the gate's initial drafter; None where a checkpoint holds none.

        A `DrafterError`, and no change, where it is none of this drafter.
        """
        if (state := load_training_state(directory)) is None:
            return None
        with self._turn():
            self.trainer.load_state(state, beside=INITIAL)
            candidate = {name: average.copy() for name, average in self._average().items()}
            saved = {name: value.float().numpy() for name, value in state.get(INITIAL, {}).items()}
            self._transition(lambda versions: versions.resumed(candidate, saved or versions.initial))
            return checksums(self.trainer, self.versions)


def check_room(checkpoint: Path, drafter: str, needed: int, leaves: Path | None = None) -> None:
    """Raise a `DrafterError` where a disk cannot take `needed` bytes, and then another checkpoint like this one.

    One that verl still writes is taken to become as large as the largest beside it. `drafter`: name of its directory.
    `leaves`: what verl removes before it writes the other one.
    """

    def policy_bytes(step: Path) -> int:
        """What is removed meanwhile counts as nothing."""
        total = 0
        for folder, folders, files in os.walk(step):
            folders[:] = [name for name in folders if drafter not in name]
            for name in files:
                with suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, name)).st_size
        return total

    written = policy_bytes(checkpoint)
    policy = max([written, *map(policy_bytes, checkpoint.parent.glob("global_step_*"))])
    more = max(0, policy - policy_bytes(leaves)) if leaves else policy
    try:
        disk = shutil.disk_usage(checkpoint)
    except OSError:  # mounts of object stores need not know
        return
    free = disk.free
    if disk.total and free < needed + (policy - written) + more:
        raise DrafterError(
            f"{checkpoint} gets no drafter: the disk has {free / 1e9:.3f} GB left, the drafter takes "
            f"{needed / 1e9:.3f} GB, and the policy's next checkpoint about {more / 1e9:.3f} GB."
        )
