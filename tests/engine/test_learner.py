"""Learners without Ray: merging makes a better drafter, and one that is not finite is neither scored nor exported."""

import dataclasses
import tempfile

import numpy as np
import pytest
from recorded import CONFIG, begin_learner_anew, record, score_for_gate, worker_arguments

from verl_tlt.drafter import DrafterError
from verl_tlt.spot_worker.buffer import Buffer
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.merge import average_slice

pytestmark = pytest.mark.engine

SESSION = 10
"""Micro-batches."""


@pytest.fixture(scope="module")
def texts():
    """(one worker's sequences, another's, held-out ones, verifier weights)."""
    sequences, weights = record(100, seed=5)
    return sequences[:36], sequences[36:72], sequences[72:], weights


@pytest.fixture(scope="module")
def made(texts):
    """Four learners; two by two they have the same sequences."""
    arguments = worker_arguments()
    learners = [SpotLearner(name, **arguments) for name in ("a", "b", "a-alone", "b-alone")]
    for learner, sequences in zip(learners, (*texts[:2], *texts[:2]), strict=True):
        learner.buffer = Buffer(max_bytes=1 << 30, keep_steps=CONFIG.buffer.keep_steps, held_out=0.0)
        learner.add(1, sequences, texts[3])
    return learners


def test_one_that_is_killed_while_it_starts_leaves_nothing_on_the_disk(monkeypatch, tmp_path):
    """No temporary directory could be made in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    assert SpotLearner("a", **worker_arguments()).versions.candidate


@pytest.fixture
def team(made):
    for learner in made:
        begin_learner_anew(learner)
    return made


def train(learner, steps=SESSION):
    until = learner.trainer.steps + steps
    learner.train(lambda: learner.trainer.steps >= until)


def merge(*learners):
    """What they trained, as spot workers do after their sessions."""
    merged = average_slice([learner.hand_in(1)[0] for learner in learners], last=True)
    for learner in learners:
        learner.adopt(merged)


def same(left, right):
    return all(np.array_equal(left[name], right[name]) for name in left)


def test_equal_workers_merged_are_better_than_each(team, texts):
    a, b, a_alone, b_alone = team
    for _ in range(2):
        for learner in team:
            train(learner)
        for merged in ((a, b), (a_alone,), (b_alone,)):
            merge(*merged)
    assert same(a.versions.candidate, b.versions.candidate)
    tau = {one.name: score_for_gate(one, texts[2]).accept_length("candidate") for one in (a, a_alone, b_alone)}
    assert tau["a"] > max(tau["a-alone"], tau["b-alone"])


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_candidate_that_is_not_finite_scores_nothing_and_is_not_exported(made, texts, temperature):
    learner = made[0]
    begin_learner_anew(learner)
    sampling, learner.sampling = learner.sampling, dataclasses.replace(learner.sampling, temperature=temperature)
    try:
        assert np.isfinite(score_for_gate(learner, texts[2][:4]).candidate).all()
        broken = {name: value.copy() for name, value in learner.versions.candidate.items()}
        broken["fc.weight"][0, 0] = np.nan
        learner.versions = dataclasses.replace(learner.versions, candidate=broken)
        scores = score_for_gate(learner, texts[2][:4])
        assert np.isnan(scores.candidate).all() and np.isfinite(scores.served).all()
        with pytest.raises(DrafterError, match=r"fc.weight holds numbers that are not finite"):
            learner.export(1, "bfloat16", [])
    finally:
        learner.sampling = sampling
        learner.revert("served")
