"""Sessions: the candidate is scored first, then the drafter is trained, and a stop is heeded in between."""

from dataclasses import replace
from itertools import chain, repeat
from unittest.mock import Mock

import pytest
import torch
from tiny_trainer import FACTS, SAMPLING, make_trainer, publish, same, session, stopped_after, texts, verifier_arrays

from verl_tlt.drafter.checkpoint import provenance
from verl_tlt.messages.training import Verdict
from verl_tlt.spot_trainer import gate, scoring
from verl_tlt.spot_trainer import trainer as module


@pytest.fixture
def trainer(tmp_path):
    return make_trainer(tmp_path / "policy", 60)


@pytest.fixture
def decides(monkeypatch):
    """Have the gate decide as the test says, and note the scores that it was given."""
    seen = []

    def decide_as(decision, serves):
        def decide(scores, *, seed):
            seen.append(scores)
            return Verdict(decision=decision, acceptance=scores.acceptance(serves), publishes=serves != "served")

        monkeypatch.setattr(module, "decide", decide)
        return seen

    return decide_as


# ---------------------------------------------------------------- training


def test_a_session_ends_with_its_epochs_or_when_it_is_stopped(tmp_path):
    trainer = make_trainer(tmp_path / "policy", 24, gate=False)
    whole = session(trainer)
    assert whole.outcome == "exhausted" and whole.steps > 1
    parts = [stopped_after(trainer, steps) for steps in (0, 1, whole.steps - 1)]
    assert [(part.steps, part.outcome) for part in parts] == [(n, "stopped") for n in (0, 1, whole.steps - 1)]


# ---------------------------------------------------------------- the verdict


def test_a_candidate_is_judged_by_the_next_session_and_once(trainer, decides):
    seen = decides("kept", "served")
    assert session(trainer).verdict is None, "the first drafter is the served one"
    candidate = trainer.candidate
    judged = session(trainer)
    assert judged.steps > 0 and judged.verdict.decision == "kept" and not judged.verdict.publishes
    assert len(seen) == 1 and seen[0].positions.sum() > 0 and (seen[0].candidate != seen[0].served).any()
    assert (seen[0].served == seen[0].initial).all()
    assert not same(candidate, trainer.candidate), "what was trained meanwhile is the next candidate"
    assert same(trainer.served, trainer.initial)


def test_what_is_published_is_the_candidate_that_was_judged(trainer, decides):
    decides("published", "candidate")
    session(trainer)
    candidate = trainer.candidate
    found = session(trainer).verdict
    assert found.publishes and found.decision == "published" and len(found.acceptance) == 3
    exported = trainer.export()
    assert exported.version == trainer.version == 1 and exported.acceptance == found.acceptance
    assert same(trainer.served, candidate) and not same(trainer.candidate, candidate)
    assert not same(trainer.served, trainer.initial)
    assert trainer.export() is None and trainer.version == 1, "nothing else is to be published"


def test_a_checkpoint_names_the_drafter_that_it_holds(trainer, tmp_path):
    """The RL trainer hears of an export after the step's checkpoint."""
    known = replace(FACTS, version=0)
    trainer.save(str(tmp_path / "before"), known)
    exported = publish(trainer)
    trainer.save(str(tmp_path / "after"), known)
    facts = [provenance(tmp_path / name) for name in ("before", "after")]
    assert [one["version"] for one in facts] == [0, 1]
    assert [tuple(one["acceptance"]) for one in facts] == [known.acceptance, exported.acceptance]


@pytest.mark.parametrize("back", ["served", "initial"])
def test_a_candidate_that_is_given_up_takes_what_was_trained_on_it_along(trainer, decides, back):
    publish(trainer)
    decides("kept", "served")
    session(trainer)  # the candidate is ahead of what was published
    decides("reverted", back)
    begun = trainer.trainer.steps
    found = session(trainer, lambda: trainer._judged or trainer.trainer.steps > begun).verdict
    wanted = getattr(trainer, back)
    assert found.decision == "reverted" and found.publishes == (back == "initial")
    assert same(trainer.candidate, wanted) and same(trainer.trainer.cloned_parameters(), wanted)
    if found.publishes:
        assert trainer.export().version == 2 and same(trainer.served, wanted), "engines get it again"


def test_with_the_gate_off_every_trained_candidate_is_published_and_nothing_is_scored(tmp_path, decides):
    """Also where a session is too short to score anything, as it is when a user turns the gate off."""
    seen = decides("reverted", "served")
    trainer = make_trainer(tmp_path / "policy", 60, gate=False)
    for version in (1, 2, 3):
        result = stopped_after(trainer, 1)
        assert result.steps == 1 and result.verdict.publishes and result.verdict.acceptance == ()
        assert trainer.export().version == version and same(trainer.served, trainer.candidate)
    assert not seen and not trainer.buffer.held_out(10**9, 0, 1), "nothing is held out either"
    assert stopped_after(trainer, 0).verdict is None, "what was not trained is not published again"


def test_numbers_that_do_not_fit_the_rollouts_dtype_are_not_published(trainer):
    session(trainer)
    broken = {name: value.clone() for name, value in trainer.candidate.items()}
    broken["fc.weight"][0, 0] = torch.nan
    trainer._approved = broken
    assert trainer.export() is None and trainer.version == 0
    assert same(trainer.served, trainer.initial) and same(trainer.candidate, trainer.served)
    assert session(trainer).steps > 0


# ---------------------------------------------------------------- scores


def stop_after(looks):
    return Mock(side_effect=chain(repeat(False, looks), repeat(True)))


def test_scores_of_a_session_that_was_stopped_are_kept(trainer, decides, monkeypatch):
    monkeypatch.setattr(scoring, "CPU_TOKENS", 40)
    session(trainer)
    seen, sessions = decides("kept", "served"), 0
    while not seen:
        result = session(trainer, stop_after(3))
        sessions += 1
        assert sessions < 100
        assert result.steps == 0 or seen
    assert sessions > 3
    assert len(seen[0].prompts) == len({*seen[0].prompts.tolist()}) > gate.MIN_PROMPTS, "each sequence once"


def test_a_version_that_is_two_of_the_three_is_scored_once(trainer, decides, monkeypatch):
    calls = []
    real = scoring.acceptance
    monkeypatch.setattr(scoring, "acceptance", lambda *args, **named: calls.append(1) or real(*args, **named))
    monkeypatch.setattr(module, "undecidable", lambda *_: None)
    decides("published", "candidate")
    session(trainer)
    session(trainer)
    two = len(calls)  # candidate, and what is both served and initial
    trainer.export()
    calls.clear()
    session(trainer)
    assert len(calls) == pytest.approx(two * 3 / 2, abs=2)


def test_more_is_scored_the_more_was_trained(trainer, decides):
    """A fifth of the work at most, but for what the gate needs at least."""
    seen = decides("kept", "served")
    stopped_after(trainer, 1)
    session(trainer)
    few = int((seen[0].positions > 0).sum())
    trainer.add(2, texts(200, seed=1), verifier_arrays())
    session(trainer)
    session(trainer)
    assert few == module.HELD_OUT_PROMPTS < int((seen[-1].positions > 0).sum())


def test_a_served_drafter_that_drafts_well_is_not_compared_by_too_little_text(trainer, decides):
    """Nothing is scored, and the session is used for training; what it is trained on counts for the next verdict."""
    seen = decides("published", "candidate")
    trainer.plan = replace(trainer.plan, drafter=replace(trainer.plan.drafter, acceptance=(0.5, 0.5, 0.5)))
    session(trainer)
    second = session(trainer)
    assert second.verdict.reason.startswith("too little to judge by (") and not seen
    assert not second.verdict.publishes and second.steps > 0
    trainer.add(2, texts(200, seed=1), verifier_arrays())
    session(trainer)
    session(trainer)
    assert seen and seen[0].positions.sum() >= gate.MIN_POSITIONS


def test_a_candidate_that_is_to_be_published_is_not_replaced_before_engines_have_it(trainer, decides, monkeypatch):
    """A replica that is called back and leaves again has two sessions in a step."""
    monkeypatch.setattr(module, "undecidable", lambda *_: None)
    seen = decides("published", "candidate")
    session(trainer)
    candidate = trainer.candidate
    assert session(trainer).verdict.publishes
    assert session(trainer).verdict is None and len(seen) == 1
    trainer.export()
    assert same(trainer.served, candidate)
    assert session(trainer).verdict is not None and len(seen) == 2


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_candidate_that_is_not_finite_is_given_up(tmp_path, temperature):
    trainer = make_trainer(tmp_path / "policy", 60, sampling={**SAMPLING, "temperature": temperature})
    session(trainer)
    trainer.trainer.averages()["fc.weight"][0, 0] = torch.nan
    result = session(trainer)
    assert result.verdict.decision == "reverted" and "not finite" in result.verdict.reason
    assert result.verdict.gain is None and not result.verdict.publishes
    assert all(value.isfinite().all() for value in trainer.candidate.values())


@pytest.mark.parametrize("random", [True, False])
def test_without_text_to_judge_by_only_a_random_head_is_replaced(tmp_path, random):
    """As where all rollouts answer one prompt."""
    trainer = make_trainer(tmp_path / "policy", 60, held_out=0.0)
    acceptance = () if not random else (0.0, 0.0, 0.0)
    trainer.plan = replace(trainer.plan, drafter=replace(trainer.plan.drafter, acceptance=acceptance))
    session(trainer)
    judged = session(trainer).verdict
    assert judged.publishes == random and judged.reason.startswith("not judged" if random else "no held-out sequences")
    assert (trainer.export() is not None) if random else trainer.version == 0
