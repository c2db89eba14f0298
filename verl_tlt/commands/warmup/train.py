"""Trains a drafter on recorded responses of its policy until a budget is used up; a killed run can go on.

Everything random follows from the seed and the place in the run, so a killed run that goes on ends as one that was not
killed. Held-out responses are scored before training and along the way, and the best weights are kept: a small set of
prompts is learnt by heart sooner or later.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tlt.commands.options import EngineOptions, WarmupOptions
from verl_tlt.commands.warmup.engine import Stage
from verl_tlt.commands.warmup.prompts import open_images
from verl_tlt.commands.warmup.run import processor_options
from verl_tlt.drafter.capture import ImageInputs, Library, PolicyStates, Span, Text, load_policy, plan_epoch
from verl_tlt.drafter.checkpoint import read_state, write_state
from verl_tlt.drafter.data import Batch, FedBatch, ahead, grouped, pack
from verl_tlt.drafter.evaluate import SequenceScore, acceptance, combined_score
from verl_tlt.drafter.model_files import first_line
from verl_tlt.drafter.train import DrafterTrainer
from verl_tlt.drafter.verifier import VerifierWeights, refresh_verifier_weights
from verl_tlt.errors import DrafterError

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

CHECKS = 10
"""Scorings of trained weights on the held-out responses, evenly spread over the run."""
JUDGED_TOKENS = 8_192
"""Most tokens of the held-out responses that a check scores, unless these are fewer than `JUDGED_RESPONSES`."""
JUDGED_RESPONSES = 16
"""Held-out responses that a check scores even if they have more than `JUDGED_TOKENS`."""
MOST_TOKENS = 65_536
"""Most tokens of the held-out responses that a check scores in any case, unless the first one alone has more."""
SAVE_EVERY_S = 60.0
"""Fewest seconds between two checkpoints."""
SAVE_SHARE = 20.0
"""Least time between two checkpoints, as a multiple of the time that the last one took to write. Training waits while
a checkpoint is written, and one may have gigabytes."""
OF_THE_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids")
"""What a processor makes of the text beside the images."""
LAST_LR = 0.1
"""Learning rate at the end of the budget, as a share of the first; the rate falls linearly."""


def image_inputs(options: EngineOptions) -> ImageInputs:
    """What verl's actor gives the policy for images, by verl's own function."""
    from verl.utils.tokenizer import build_multimodal_processor_inputs, hf_processor

    processor, arguments = hf_processor(str(options.model)), processor_options(options)

    def inputs(files: Sequence[str]) -> dict[str, torch.Tensor]:
        text = [processor.image_token * len(files)]  # of no use but that a processor wants one
        images = open_images(files)
        made = build_multimodal_processor_inputs(processor, text=text, images=images, mm_processor_kwargs=arguments)
        return {name: value for name, value in made.items() if name not in OF_THE_TEXT}

    return inputs


class PolicyTexts(Library):
    """A policy's texts and hidden states, for a drafter whose verifier weights this fills from the policy."""

    def __init__(
        self, drafter: Eagle3DraftModel, options: EngineOptions, texts: Sequence[Text], device: str, max_bytes: int
    ) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()  # the commands show their own
        parts = VerifierWeights.from_policy_dir(options.model)
        refresh_verifier_weights(drafter, parts)
        images = image_inputs(options) if any(text.images for text in texts) else None
        states = PolicyStates(load_policy(options.model, device), drafter.target_layer_ids, images)
        super().__init__(states, texts, max_bytes)
        self._options = options
        self._whole_head = parts.lm_head.to(device) if drafter.use_draft_vocab else None  # [V, H]

    def tokens(self, numbers: Iterable[int]) -> int:
        return sum(len(self.texts[n].tokens) for n in numbers)

    def responses(self, numbers: Iterable[int]) -> int:
        """Tokens of these texts' responses: no draft of a prompt is judged."""
        return sum(len(self.texts[n].tokens) - self.texts[n].prompt_len for n in numbers)

    def score(
        self, drafter: Eagle3DraftModel, numbers: Sequence[int], budget: int, tell: Callable[[int, int], None]
    ) -> SequenceScore:
        """What the policy would accept of drafts in these texts, `budget` tokens at once; `tell`: tokens done, all."""
        options = self._options
        scores: list[SequenceScore] = []
        done = 0
        for group in grouped(numbers, lambda n: self.tokens([n]), budget):
            tell(done, self.tokens(numbers))
            scores += acceptance(
                drafter,
                self.get(group),
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                max_draft=options.draft_length,
                budget=budget,
                lm_head=self._whole_head,
            )
            done += self.tokens(group)
        return combined_score(scores, options.draft_length)


@dataclass
class TrainingProgress:
    """How far a training run is; all of it survives a kill."""

    epoch: int = 0
    batch: int = 0  # batches done in this epoch
    tokens: int = 0  # rows with a loss that were learned from
    seconds: float = 0.0  # of training, without the checks
    loss: float = math.nan  # moving average
    checks: list[dict[str, float]] = field(default_factory=list)
    """{"step", "tokens", "seconds", "tau"} of each check of the held-out responses."""
    acceptance: list[float] = field(default_factory=list)
    """Acceptance of the best weights, by draft position."""


@dataclass
class TrainingRun:
    """One training run on a library of texts."""

    trainer: DrafterTrainer
    library: PolicyTexts
    train: list[int]  # numbers of the texts to learn from
    judged: list[int]  # numbers of the held-out texts
    options: WarmupOptions
    state_file: Path
    stage: Stage  # shows how far it is

    def __post_init__(self) -> None:
        self.progress = TrainingProgress()
        self.best = self.trainer.cloned_parameters()
        self._peak_lr = self.trainer.learning_rate
        self._turn = threading.Lock()  # policy and drafter in turn: both at once need more of the device's memory
        self._lengths = [self.library.tokens([n]) for n in self.train]
        self._plan = self._plan_of(0)

    @property
    def spent(self) -> float:
        """Share of the budget used: 1 is all of it."""
        epochs = self.progress.epoch + self.progress.batch / max(1, len(self._plan))
        of_epochs = epochs / self.options.epochs
        of_steps = self.trainer.steps / self.options.max_steps
        of_minutes = self.progress.seconds / 60 / self.options.max_minutes
        return min(1.0, max(of_epochs, of_steps, of_minutes))

    @property
    def taus(self) -> list[float]:
        return [check["tau"] for check in self.progress.checks]

    def _resume(self) -> None:
        """Go on from the state of an earlier, killed run, if there is one."""
        if not self.state_file.is_file():
            return
        try:
            state = read_state(self.state_file)
            self.trainer.load_state(state["trainer"])
            self.progress = TrainingProgress(**state["progress"])
            self.best = dict(state["best"])
            self._plan = self._plan_of(self.progress.epoch)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"is no state of this training, such as another release would write ({first_line(error)})"
            raise DrafterError(f"{self.state_file} {reason}: remove it to train anew on the same responses.") from error

    def __call__(self) -> None:
        """Train to the end of the budget, then take the best weights."""
        self._resume()
        last_save = time.perf_counter()
        save_every_s = SAVE_EVERY_S
        with ahead(self._batches(), self.trainer.feed()) as source:
            if not self.taus:
                with self._turn:
                    self._check()
            while self.spent < 1.0:
                started = time.perf_counter()
                fed = next(source)
                with self._turn:
                    self._step(fed)
                    self.progress.seconds += time.perf_counter() - started
                    self._check_if_due()
                self.stage.tell(self.spent, self._note())
                now = time.perf_counter()
                if now - last_save > save_every_s:
                    self.save()
                    last_save = time.perf_counter()
                    save_every_s = max(SAVE_EVERY_S, SAVE_SHARE * (last_save - now))
        if self.progress.checks[-1]["step"] < self.trainer.steps:  # an interrupted run goes on with another budget
            self._check()
        self.trainer.load_parameters(self.best)
        self.save()

    def _check_if_due(self) -> None:
        """Score the weights at evenly spread places of the run, and at its end."""
        if self.spent >= len(self.progress.checks) / CHECKS:
            self._check()
            self.stage.say(f"{100 * self.spent:3.0f} %  {self._note()}")

    def _check(self) -> None:
        """Score the drafter on the held-out responses; its weights are kept if they are the best so far."""
        p = self.progress

        def tell(done: int, total: int) -> None:
            self.stage.tell(self.spent, f"{done} of {total} held-out tokens scored")

        score = self.library.score(self.trainer.model, self._texts_to_judge(), self.options.batch_tokens, tell)
        if not self.taus or score.accept_length >= max(self.taus):
            self.best = self.trainer.cloned_parameters()
            p.acceptance = score.accept.tolist()
        check = {"step": self.trainer.steps, "tokens": p.tokens, "seconds": p.seconds, "tau": score.accept_length}
        p.checks.append(check)

    def _texts_to_judge(self) -> list[int]:
        """Numbers of the held-out texts that a check scores: the first ones, up to its bounds."""
        chosen: list[int] = []
        tokens = 0
        for number in self.judged:
            tokens += self.library.responses([number])
            most = MOST_TOKENS if len(chosen) < JUDGED_RESPONSES else JUDGED_TOKENS
            if tokens > most:
                break
            chosen.append(number)
        return chosen or self.judged[:1]

    def _note(self) -> str:
        p = self.progress
        return f"step {self.trainer.steps}, {p.tokens} tokens, loss {p.loss:.3f}, accept length {self.taus[-1]:.2f}"

    def save(self) -> None:
        state = {
            "trainer": self.trainer.state(),
            "progress": dict(vars(self.progress)),
            "best": self.best,
        }
        draft = self.state_file.with_suffix(".new")
        write_state(state, draft)
        os.replace(draft, self.state_file)

    def _batches(self) -> Iterator[Batch]:
        """The batches that are left to train on, epoch after epoch; drawn in a thread of its own."""
        epoch = self.progress.epoch
        left = self._plan[self.progress.batch :]
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
            if not result.skipped:
                p.tokens += result.tokens
            p.loss = result.loss if math.isnan(p.loss) else 0.95 * p.loss + 0.05 * result.loss
        p.batch += 1
        if p.batch == len(self._plan):
            p.epoch += 1
            p.batch = 0
            self._plan = self._plan_of(p.epoch)

    def _plan_of(self, epoch: int) -> list[list[Span]]:
        return plan_epoch(self._lengths, self.options.batch_tokens, (self.options.seed, epoch))
