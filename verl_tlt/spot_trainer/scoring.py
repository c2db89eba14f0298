"""Scores of candidate, served and initial drafter on the same held-out sequences.

Scoring goes in portions, and a stop is heeded between two of them. What a session has scored the next one need not
score again: the candidate is the same until it was judged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_tlt.drafter import DrafterTrainer, SequenceScore, TrainingSequence, acceptance
from verl_tlt.drafter.data import grouped
from verl_tlt.spot_trainer.gate import HeldOutScores, Which, combined

Parameters = Mapping[str, torch.Tensor]
"""Trainable parameters of a drafter by name, float32, on the host. They are replaced and never written to."""

PORTION = 1024
"""Most tokens scored at once, and between two looks at the stop flag, but at least one sequence."""
KEPT_TOKENS = 8192
"""Tokens of a group, which all three drafters score before the next one. On an accelerator the weights of each drafter
are moved there for each group: gigabytes, which takes tenths of a second."""
CPU_TOKENS = 256
"""`KEPT_TOKENS` and `PORTION` on a CPU, which takes seconds for so many tokens with a real vocabulary."""


@dataclass(eq=False)
class Scoring:
    """The scores so far of one candidate; the sequences to score are chosen when it begins."""

    versions: Mapping[Which, Parameters]
    sampling: Mapping[str, Any]  # `SpotPlan.sampling`
    max_draft: int
    left: list[TrainingSequence]
    parts: list[HeldOutScores] = field(default_factory=list)

    def run(
        self,
        trainer: DrafterTrainer,
        rows: int,
        lm_head: torch.Tensor | None,
        should_stop: Callable[[], bool],
    ) -> HeldOutScores | None:
        """Score what is left; None where `should_stop` ended it before everything was scored.

        `rows` at once at most. `lm_head` is the policy's whole head, for a pruned draft vocabulary.
        """
        group_tokens = KEPT_TOKENS if trainer.device.type == "cuda" else min(rows, CPU_TOKENS)
        for group in list(grouped(self.left, len, group_tokens)):
            part = self._score(trainer, group, min(rows, group_tokens, PORTION), lm_head, should_stop)
            if part is None:
                return None
            self.parts.append(part)
            del self.left[: len(group)]
        return combined(self.parts)

    def _score(
        self,
        trainer: DrafterTrainer,
        group: list[TrainingSequence],
        budget: int,
        lm_head: torch.Tensor | None,
        should_stop: Callable[[], bool],
    ) -> HeldOutScores | None:
        """Scores of all three drafters on a group of sequences; None where `should_stop` ended it."""
        counts: dict[Which, np.ndarray] = {}
        positions = np.zeros(0, np.int64)
        for which, parameters in self.versions.items():
            same = [other for other in counts if self.versions[other] is parameters]
            if same:  # until something is published, the served drafter is the initial one
                counts[which] = counts[same[0]]
                continue
            scores: list[SequenceScore] = []
            with trainer.holding(parameters):
                for portion in grouped(group, len, budget):
                    if should_stop():
                        return None
                    scores += acceptance(
                        trainer.model, portion, **self.sampling, max_draft=self.max_draft, budget=budget,
                        lm_head=lm_head,
                    )  # fmt: skip
            counts[which] = np.array([[s.drafts, *s.accepted] for s in scores], dtype=np.float64)
            positions = np.array([s.positions for s in scores], dtype=np.int64)
        prompts = np.array([prompt_of(sequence) for sequence in group], dtype=np.uint64)
        return HeldOutScores(prompts, positions, counts["candidate"], counts["served"], counts["initial"])


def prompt_of(sequence: TrainingSequence) -> int:
    """Number of a sequence's prompt; one of its own where that is unknown."""
    return id(sequence) if sequence.prompt is None else sequence.prompt
