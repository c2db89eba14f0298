"""Spot learners outside a run, which own their device: merged and scored at once instead of during sessions."""

from collections.abc import Sequence

from verl_tlt.drafter import SequenceScore, TrainingSequence
from verl_tlt.messages.training import HeldOutScores, MergeFacts
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.merge import average_slice
from verl_tlt.spot_worker.scoring import score_versions


def merge(learners: Sequence[SpotLearner], trained: Sequence[SpotLearner] | None = None) -> MergeFacts:
    """Merge what some of them trained (None: all), as spot workers do after their sessions."""
    merged = average_slice([learner.hand_in(1)[0] for learner in trained or learners], last=True)
    for learner in learners:
        learner.adopt(merged)
    return merged.facts


def score(
    learner: SpotLearner, sequences: list[TrainingSequence], which: Sequence[str], max_draft: int
) -> dict[str, list[SequenceScore]]:
    """Score some of its versions, on the CPU."""
    versions = {one: learner.versions.of(one) for one in which}
    found = score_versions(
        learner.trainer, versions, sequences, learner.sampling, max_draft, learner.whole_head, lambda: False
    )
    assert found is not None
    return found


def score_for_gate(learner: SpotLearner, sequences: list[TrainingSequence], max_draft: int) -> HeldOutScores:
    """What the gate would be told of its candidate."""
    found = learner._score_held_out(sequences, max_draft, lambda: False)
    assert found is not None
    return found
