"""Scores for the gate: several versions of a drafter on the same sequences, as long as nobody says stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch

from verl_tlt.drafter import DrafterTrainer, Sequence, SequenceScore, acceptance
from verl_tlt.messages.training import Parameters, RolloutSampling

PORTION = 1024
"""Rows scored at once, and tokens between two looks at the stop flag (but at least one sequence)."""


def score_versions(
    trainer: DrafterTrainer,
    versions: Mapping[str, Parameters],
    sequences: list[Sequence],
    sampling: RolloutSampling,
    max_draft: int,
    lm_head: torch.Tensor | None,
    should_stop: Callable[[], bool],
) -> dict[str, list[SequenceScore]] | None:
    """Score each version, one and the same only once; the trainer's own weights come back.

    None when told to stop: half a comparison is none.

    Args:
        trainer: of the drafter.
        versions: its parameters, by name.
        sequences: scored in their order.
        sampling: the rollout's.
        max_draft: K.
        lm_head: the policy's whole head, for a pruned draft vocabulary (`drafter.acceptance`).
        should_stop: asked before each portion of the sequences.
    """
    # Until something is published, the served drafter is the initial one.
    scored: dict[int, list[SequenceScore]] = {id(parameters): [] for parameters in versions.values()}
    for parameters in {id(parameters): parameters for parameters in versions.values()}.values():
        with trainer.holding(parameters):
            for some in portions(sequences, PORTION):
                if should_stop():
                    return None
                scored[id(parameters)] += acceptance(
                    trainer.model,
                    some,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    max_draft=max_draft,
                    budget=PORTION,
                    lm_head=lm_head,
                )
    return {name: scored[id(parameters)] for name, parameters in versions.items()}


def portions(sequences: Iterable[Sequence], tokens: int) -> Iterator[list[Sequence]]:
    """Sequences in order, as many at a time as have at most `tokens` together, but at least one."""
    held: list[Sequence] = []
    for sequence in sequences:
        if held and sum(map(len, held)) + len(sequence) > tokens:
            yield held
            held = []
        held.append(sequence)
    if held:
        yield held


def counts(scores: list[SequenceScore], max_draft: int) -> np.ndarray:
    """Drafts and acceptances as `HeldOutScores` has them: float64 [S, 1+K]."""
    return np.array([[s.drafts, *s.accepted] for s in scores], dtype=np.float64).reshape(-1, 1 + max_draft)
