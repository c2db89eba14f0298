"""Scores for the gate: several versions of a drafter on the same held-out sequences, until told to stop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
import torch

from verl_tlt.drafter import DrafterTrainer, SequenceScore, TrainingSequence, acceptance
from verl_tlt.drafter.data import grouped
from verl_tlt.messages.training import VERSIONS, HeldOutScores, Parameters, RolloutSampling

PORTION = 1024
"""Most tokens scored between two looks at the stop flag (but at least one sequence), and fewest worth scoring."""
KEPT_TOKENS = 8192
"""Tokens after which the scores of all versions are kept, on an accelerator: each time their weights are moved there,
a tenth of a second for a 7B policy's drafter."""
CPU_TOKENS = 256
"""`KEPT_TOKENS` and `PORTION` on a CPU, which takes seconds for so many tokens with a real vocabulary."""
HELD_OUT_TOKENS = 32_768
"""Most tokens a gate looks at: twice what a paired comparison needs, and still seconds of work."""
FEWEST_PROMPTS = 8
"""Fewest prompts to score, however long their sequences: the gate judges nothing by fewer than `gate.MIN_PROMPTS`."""
JUDGING_SHARE = 0.25
"""Largest share of a session that its scores may take: three quarters are for training."""


@dataclass(eq=False)
class Judging:
    """The scores of one candidate, and of the served and the initial drafter beside it, as far as there are any.

    It outlives the session: one that is told to stop leaves to the next what all versions were scored on. They are
    compared on the same text under the same verifier weights, whatever the session.
    """

    versions: Mapping[str, Parameters]
    scores: dict[str, list[SequenceScore]] = field(default_factory=lambda: {which: [] for which in VERSIONS})
    prompts: list[int] = field(default_factory=list)
    """The prompt of each scored sequence, by a number."""
    tokens: int = 0
    seconds: float = 0.0
    judged_s: float = 0.0
    """The part of the sessions' `seconds` that went into the scores."""
    _seen: WeakSet[TrainingSequence] = field(default_factory=WeakSet)

    def enough(self, sequences: Sequence[TrainingSequence]) -> bool:
        """Whether as many tokens and prompts were scored as these sequences have."""
        prompts = len({id(s) if s.prompt is None else s.prompt for s in sequences})
        return self.tokens >= sum(map(len, sequences)) and len({*self.prompts}) >= min(FEWEST_PROMPTS, prompts)

    def new(self, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
        """Those of these sequences that were not scored yet."""
        return [sequence for sequence in sequences if sequence not in self._seen]

    def add(self, sequences: Sequence[TrainingSequence], scores: Mapping[str, list[SequenceScore]]) -> None:
        for sequence in sequences:
            self.prompts.append(len(self.prompts) if sequence.prompt is None else sequence.prompt)
            self.tokens += len(sequence)
            self._seen.add(sequence)
        for version, new in scores.items():
            self.scores[version] += new

    def combined(self, max_draft: int) -> HeldOutScores:
        """The scores for the gate; a candidate whose numbers are not finite has scores that are not either."""
        acceptances = {
            version: np.array([[s.drafts, *s.accepted] for s in scores], dtype=np.float64).reshape(-1, 1 + max_draft)
            for version, scores in self.scores.items()
        }
        if not all(np.isfinite(value).all() for value in self.versions["candidate"].values()):
            acceptances["candidate"][:] = np.nan  # greedy acceptance is a number whatever the logits are
        positions = np.array([score.positions for score in self.scores["candidate"]], dtype=np.int64)
        return HeldOutScores(np.array(self.prompts, dtype=np.uint64), positions, **acceptances)


def tokens_to_judge(most: int, tokens: int, share: float | None, *, ran_out: bool) -> int:
    """How many held-out tokens the next session that scores looks at; `most` was the limit of the last one.

    That one had `tokens`, of which the sessions since the merge spent `share` of their time; None: it was told to stop
    before it had all scores. It `ran_out` of epochs, or was stopped.
    """
    if share is None:
        wanted = tokens // 2
    elif share > JUDGING_SHARE and not ran_out:
        wanted = int(tokens * max(JUDGING_SHARE / share, 0.5))
    else:
        wanted = max(most, int(tokens * min(JUDGING_SHARE / max(share, 1e-9), 2.0)))
    return min(max(wanted, PORTION), HELD_OUT_TOKENS)


def score_versions(
    trainer: DrafterTrainer,
    versions: Mapping[str, Parameters],
    sequences: list[TrainingSequence],
    sampling: RolloutSampling,
    max_draft: int,
    lm_head: torch.Tensor | None,
    should_stop: Callable[[], bool],
    rows: int = PORTION,
) -> dict[str, list[SequenceScore]] | None:
    """Scores of the sequences by version, the same parameters scored only once; None when told to stop.

    The trainer's own weights are restored. `lm_head` is the policy's whole head, for a pruned draft vocabulary.
    `should_stop` is asked before each portion: no more tokens than a micro-batch of `rows`, but a sequence at least.
    """
    budget = min(rows, PORTION)
    scored: dict[int, list[SequenceScore]] = {}
    for parameters in versions.values():
        if id(parameters) in scored:  # until something is published, the served drafter is the initial one
            continue
        found = scored[id(parameters)] = []
        with trainer.holding(parameters):
            for portion in grouped(sequences, len, budget):
                if should_stop():
                    return None
                found += acceptance(
                    trainer.model, portion, **vars(sampling), max_draft=max_draft, budget=budget, lm_head=lm_head
                )
    return {name: scored[id(parameters)] for name, parameters in versions.items()}
