"""Trains a drafter on recorded responses of its policy until a budget is used up, in a way that a kill cannot spoil.

Everything random follows from the seed and the place in the run, and the state is written often, so a run that was
killed goes on where it was. Held-out responses are scored along the way and the best weights are kept: a small set
of prompts is learnt by heart sooner or later.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_tlt.drafter import (
    DrafterTrainer,
    Library,
    SequenceScore,
    accept_length,
    acceptance,
    pack,
    plan_epoch,
)
from verl_tlt.drafter.data import grouped

CHECKS = 10
"""Times the held-out responses are scored in a run."""
JUDGED_TOKENS = 8_192
"""Most tokens of held-out responses scored in a check."""
SAVE_EVERY_S = 60.0
LAST_LR = 0.1
"""Learning rate at the end of the budget, as a share of the first: it falls along a line."""


@dataclass(frozen=True)
class Budget:
    """Training ends with whichever is used up first."""

    epochs: float = 4.0
    steps: float = math.inf
    tokens: float = math.inf
    """Rows with a loss."""
    minutes: float = math.inf


@dataclass
class TrainingProgress:
    """Where the run is; all of it survives a kill."""

    epoch: int = 0
    batch: int = 0
    """Batches done in this epoch."""
    tokens: int = 0
    seconds: float = 0.0
    """Of training, without the checks."""
    loss: float = math.nan
    checks: list[dict[str, float]] = field(default_factory=list)
    """{"step", "tokens", "seconds", "tau"} of each check of the held-out responses."""

    def spent(self, budget: Budget, steps: int, batches: int) -> float:
        """Share of the budget used: 1 is all of it."""
        return max(
            (self.epoch + self.batch / max(1, batches)) / budget.epochs,
            steps / budget.steps,
            self.tokens / budget.tokens,
            self.seconds / 60 / budget.minutes,
        )


class TrainingRun:
    """One training run.

    Args:
        trainer: with its verifier weights filled, on its device.
        library: captures the policy's states.
        train: numbers of the texts to learn from.
        judged: numbers of the texts held out.
        budget: when to end.
        batch_tokens: rows of a batch.
        draft_length: K of the checks.
        sampling: `temperature`, `top_p`, `top_k` the responses were sampled with.
        state_file: where the run's state is kept.
        seed: decides the order of texts.
        whole_head: [V, H], for a pruned draft vocabulary.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        library: Library,
        train: Sequence[int],
        judged: Sequence[int],
        budget: Budget,
        *,
        batch_tokens: int,
        draft_length: int,
        sampling: dict[str, Any],
        state_file: Path,
        seed: int = 0,
        whole_head: Any = None,
    ) -> None:
        self.trainer, self.library, self.budget = trainer, library, budget
        self.train = list(train)
        self.judged = next(grouped(judged, lambda n: len(library.texts[n].tokens), JUDGED_TOKENS), [])
        self.batch_tokens, self.draft_length, self.sampling = batch_tokens, draft_length, sampling
        self.state_file, self.seed, self.whole_head = state_file, seed, whole_head
        self.progress = TrainingProgress()
        self.best: dict[str, np.ndarray] = {}
        self._peak_lr = trainer.learning_rate
        self._lengths = [len(library.texts[n].tokens) for n in self.train]
        self._plan = self._plan_of(0)

    @property
    def spent(self) -> float:
        """Share of the budget used."""
        return min(1.0, self.progress.spent(self.budget, self.trainer.steps, len(self._plan)))

    @property
    def taus(self) -> list[float]:
        """Simulated accept length at each check."""
        return [check["tau"] for check in self.progress.checks]

    def resume(self) -> bool:
        """Go on from the state file; False where there is none."""
        from verl_tlt.drafter.state_file import read_state

        if not self.state_file.is_file():
            return False
        state = read_state(self.state_file)
        self.trainer.load_state(state["trainer"])
        self.progress = TrainingProgress(**state["progress"])
        self.best = {name: value.numpy() for name, value in state["best"].items()}
        self._plan = self._plan_of(self.progress.epoch)
        return True

    def __call__(self, tell: Callable[[TrainingRun], None] = lambda run: None) -> None:
        """Train to the end of the budget, then take the best weights; `tell` hears of every step."""
        saved = time.perf_counter()
        if not self.progress.checks:
            self.check()
        while self.spent < 1.0:
            started = time.perf_counter()
            self._step()
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
            max_draft=self.draft_length,
            budget=self.batch_tokens,
            lm_head=self.whole_head,
            **self.sampling,
        )

    def save(self) -> None:
        """Write the state in one piece."""
        import torch

        from verl_tlt.drafter.state_file import write_state

        state = {
            "trainer": self.trainer.state(),
            "progress": dict(vars(self.progress)),
            "best": {name: torch.from_numpy(value) for name, value in self.best.items()},
        }
        draft = self.state_file.with_suffix(".new")
        write_state(state, draft)
        os.replace(draft, self.state_file)

    def _step(self) -> None:
        p = self.progress
        spans = self._plan[p.batch]
        texts = self.library.get([self.train[span.number] for span in spans])
        batch = pack([text.window(span.begin, span.end) for text, span in zip(texts, spans, strict=True)])
        if batch.for_passes(self.trainer.ttt_steps).tokens:
            self.trainer.learning_rate = self._peak_lr * (1 - (1 - LAST_LR) * self.spent)
            result = self.trainer.step(batch)
            p.tokens += 0 if result.skipped else result.tokens
            p.loss = result.loss if math.isnan(p.loss) else 0.95 * p.loss + 0.05 * result.loss
        p.batch += 1
        if p.batch == len(self._plan):
            p.epoch, p.batch = p.epoch + 1, 0
            self._plan = self._plan_of(p.epoch)

    def _plan_of(self, epoch: int) -> list[Any]:
        return plan_epoch(self._lengths, self.batch_tokens, (self.seed, epoch))
