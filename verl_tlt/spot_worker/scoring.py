"""Scores for the gate: several versions of a drafter on the same held-out sequences, until told to stop."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from verl_tlt.drafter import DrafterTrainer, SequenceScore, TrainingSequence, acceptance
from verl_tlt.drafter.data import grouped
from verl_tlt.messages.training import Parameters, RolloutSampling

PORTION = 1024
"""Most tokens scored between two looks at the stop flag (but at least one sequence), and fewest worth scoring."""
HELD_OUT_TOKENS = 32_768
"""Most tokens a gate looks at: twice what a paired comparison needs, and still seconds of work."""
FEWEST_PROMPTS = 8
"""Fewest prompts to score, however long their sequences: the gate judges nothing by fewer than `gate.MIN_PROMPTS`."""
JUDGING_SHARE = 0.25
"""Largest share of a session that its scores may take: three quarters are for training."""


def tokens_to_judge(most: int, tokens: int, share: float | None, *, ran_out: bool) -> int:
    """How many held-out tokens the next session that scores looks at; `most` was the limit of the last one.

    That one saw `tokens` and spent `share` of its time on them; None: it was told to stop before it had all scores. It
    `ran_out` of epochs, or was stopped.
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
    portion = min(rows, PORTION)
    # Until something is published, the served drafter is the initial one.
    scored: dict[int, list[SequenceScore]] = {id(parameters): [] for parameters in versions.values()}
    for parameters in {id(parameters): parameters for parameters in versions.values()}.values():
        with trainer.holding(parameters):
            for some in grouped(sequences, len, portion):
                if should_stop():
                    return None
                scored[id(parameters)] += acceptance(
                    trainer.model, some, **vars(sampling), max_draft=max_draft, budget=portion, lm_head=lm_head
                )
    return {name: scored[id(parameters)] for name, parameters in versions.items()}


def counts(scores: list[SequenceScore], max_draft: int) -> np.ndarray:
    """Drafts and acceptances as `HeldOutScores` has them: float64 [S, 1+K]."""
    return np.array([[s.drafts, *s.accepted] for s in scores], dtype=np.float64).reshape(-1, 1 + max_draft)
