"""Trains a drafter on recorded responses of its policy until a budget is used up; a killed run can go on.

Everything random follows from the seed and the place in the run, and the state is written often, so a run that was
killed ends as it would have without. Held-out responses are scored along the way and the best weights are kept: a
small set of prompts is learnt by heart sooner or later.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl_tlt.drafter import (
    Batch,
    DrafterTrainer,
    Library,
    PolicyStates,
    SequenceScore,
    Text,
    VerifierWeights,
    accept_length,
    acceptance,
    load_policy,
    pack,
    plan_epoch,
    refresh_verifier_weights,
)
from verl_tlt.drafter.capture import Span
from verl_tlt.drafter.checkpoint import read_state, write_state
from verl_tlt.drafter.data import grouped
from verl_tlt.drafter.feed import FedBatch, ahead
from verl_tlt.warmup.options import EngineOptions, TrainingOptions

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

CHECKS = 10
"""Times the held-out responses are scored in a run."""
JUDGED_TOKENS = 8_192
"""Most tokens of held-out responses scored in a check."""
SAVE_EVERY_S = 60.0
LAST_LR = 0.1
"""Learning rate at the end of the budget, as a share of the first: it falls along a line."""


def policy_library(
    drafter: Eagle3DraftModel, options: EngineOptions, texts: Sequence[Text], device: str, max_bytes: int
) -> tuple[Library, torch.Tensor | None]:
    """The policy's states for texts and, for a pruned draft vocabulary, its whole head [V, H].

    Fills the drafter's verifier weights from the policy.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the commands show their own
    parts = VerifierWeights.from_policy_dir(options.model)
    refresh_verifier_weights(drafter, parts)
    states = PolicyStates(load_policy(options.model, device), drafter.target_layer_ids)
    return Library(states, texts, max_bytes), parts.lm_head.to(device) if drafter.use_draft_vocab else None


@dataclass
class TrainingProgress:
    """Where the run is; all of it survives a kill."""

    epoch: int = 0
    batch: int = 0
    """Batches done in this epoch."""
    tokens: int = 0
    """Rows with a loss that were learned from."""
    seconds: float = 0.0
    """Of training, without the checks."""
    loss: float = math.nan  # moving average
    checks: list[dict[str, float]] = field(default_factory=list)
    """{"step", "tokens", "seconds", "tau"} of each check of the held-out responses."""


class TrainingRun:
    """One training run on the library's texts: those numbered `train` to learn from, `judged` held out.

    The trainer's verifier weights are filled; `whole_head` [V, H] is needed for a pruned draft vocabulary.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        library: Library,
        train: Sequence[int],
        judged: Sequence[int],
        options: TrainingOptions,
        *,
        state_file: Path,
        whole_head: torch.Tensor | None = None,
    ) -> None:
        self.trainer, self.library, self.options = trainer, library, options
        self.train = list(train)
        self.judged = next(grouped(judged, lambda n: len(library.texts[n].tokens), JUDGED_TOKENS), [])
        self.state_file, self.whole_head = state_file, whole_head
        self.progress = TrainingProgress()
        self.best: dict[str, np.ndarray] = {}
        self._peak_lr = trainer.learning_rate
        self._turn = threading.Lock()  # of policy and drafter: both at once would need more of the device's memory
        self._lengths = [len(library.texts[n].tokens) for n in self.train]
        self._plan = self._plan_of(0)

    @property
    def spent(self) -> float:
        """Share of the budget used: 1 is all of it."""
        p, most = self.progress, self.options
        epochs = p.epoch + p.batch / max(1, len(self._plan))
        parts = (epochs / most.epochs, self.trainer.steps / most.max_steps, p.tokens / most.max_tokens,
                 p.seconds / 60 / most.max_minutes)  # fmt: skip
        return min(1.0, max(parts))

    @property
    def taus(self) -> list[float]:
        """Simulated accept length at each check."""
        return [check["tau"] for check in self.progress.checks]

    def resume(self) -> None:
        """Go on from the state file, if there is one."""
        if not self.state_file.is_file():
            return
        state = read_state(self.state_file)
        self.trainer.load_state(state["trainer"])
        self.progress = TrainingProgress(**state["progress"])
        self.best = {name: value.numpy() for name, value in state["best"].items()}
        self._plan = self._plan_of(self.progress.epoch)

    def __call__(self, tell: Callable[[TrainingRun], None] = lambda run: None) -> None:
        """Train to the end of the budget, then take the best weights; `tell` is called after every step."""
        saved = time.perf_counter()
        if not self.progress.checks:
            self.check()
        with ahead(self._batches(), self.trainer.feed()) as source:
            while self.spent < 1.0:
                started = time.perf_counter()
                fed = next(source)
                with self._turn:
                    self._step(fed)
                    self.progress.seconds += time.perf_counter() - started
                    if self.spent >= len(self.progress.checks) / CHECKS:
                        self.check()
                tell(self)
                if time.perf_counter() - saved > SAVE_EVERY_S:
                    self.save()
                    saved = time.perf_counter()
        self.trainer.load_parameters(self.best)
        self.save()

    def check(self) -> None:
        """Score the held-out responses and remember the weights if they are the best so far."""
        tau = accept_length(self.score())
        if not self.taus or tau > max(self.taus):
            self.best = self.trainer.parameters_numpy()
        p = self.progress
        p.checks.append({"step": self.trainer.steps, "tokens": p.tokens, "seconds": p.seconds, "tau": tau})

    def score(self) -> list[SequenceScore]:
        """Scores of the held-out responses under the present weights."""
        return acceptance(
            self.trainer.model,
            self.library.get(self.judged),
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            top_k=self.options.top_k,
            max_draft=self.options.draft_length,
            budget=self.options.batch_tokens,
            lm_head=self.whole_head,
        )

    def save(self) -> None:
        """Write the state in one piece."""
        state = {
            "trainer": self.trainer.state(),
            "progress": dict(vars(self.progress)),
            "best": {name: torch.from_numpy(value) for name, value in self.best.items()},
        }
        draft = self.state_file.with_suffix(".new")
        write_state(state, draft)
        os.replace(draft, self.state_file)

    def _batches(self) -> Iterator[Batch]:
        """All that is left to train on, epoch after epoch; drawn in a thread of its own, one ahead of the step."""
        epoch, left = self.progress.epoch, self._plan[self.progress.batch :]
        while left:
            for spans in left:
                with self._turn:
                    texts = self.library.get([self.train[span.number] for span in spans])
                yield pack([text.window(span.begin, span.end) for text, span in zip(texts, spans, strict=True)])
            epoch += 1
            left = self._plan_of(epoch)

    def _step(self, fed: FedBatch) -> None:
        p = self.progress
        if fed.tokens:
            self.trainer.learning_rate = self._peak_lr * (1 - (1 - LAST_LR) * self.spent)
            result = self.trainer.step_on(fed)
            p.tokens += 0 if result.skipped else result.tokens
            p.loss = result.loss if math.isnan(p.loss) else 0.95 * p.loss + 0.05 * result.loss
        p.batch += 1
        if p.batch == len(self._plan):
            p.epoch, p.batch = p.epoch + 1, 0
            self._plan = self._plan_of(p.epoch)

    def _plan_of(self, epoch: int) -> list[list[Span]]:
        return plan_epoch(self._lengths, self.options.batch_tokens, (self.options.seed, epoch))
