"""Sessions whose micro-batches are drawn ahead: what was drawn and not used is as if it had not been."""

import pytest
import torch
from tiny_learner import make_learner, texts, verifier_arrays

from verl_tlt.spot_worker import learner as spot_learner


@pytest.fixture
def drawn(monkeypatch):
    """Token sums of the micro-batches that were packed."""
    found, real = [], spot_learner.pack

    def pack(sequences):
        batch = real(sequences)
        found.append(int(batch.input_ids.sum()))
        return batch

    monkeypatch.setattr(spot_learner, "pack", pack)
    return found


def learner_of(directory, sequences=24):
    made = make_learner(directory / "policy")
    made.add(1, texts(sequences), verifier_arrays())
    return made


def stopped_after(learner, steps):
    until = learner.trainer.steps + steps
    return learner.train(lambda: learner.trainer.steps >= until)


def test_epochs_are_those_of_the_steps_taken(tmp_path):
    learner = learner_of(tmp_path)
    whole = learner.train(lambda: False)
    assert whole.outcome == "exhausted" and whole.epochs == pytest.approx(1.0)
    parts = [stopped_after(learner, steps) for steps in (0, 1, whole.steps - 1)]
    assert [part.steps for part in parts] == [0, 1, whole.steps - 1]
    assert parts[0].epochs == 0.0 < parts[1].epochs < parts[2].epochs < 1.0


def test_the_next_sessions_order_does_not_hang_on_where_this_one_stopped(tmp_path, drawn):
    orders = []
    for steps in (0, 1, 1000):
        learner = learner_of(tmp_path)
        stopped_after(learner, steps)
        drawn.clear()
        learner.train(lambda: False)
        orders.append(list(drawn))
    assert orders[0] == orders[1] == orders[2] and len(set(orders[0])) > 2


def test_what_fails_in_drawing_is_the_sessions_error(tmp_path, monkeypatch):
    learner = learner_of(tmp_path)
    monkeypatch.setattr(learner.buffer, "sample_batch", lambda rng, budget: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learner.train(lambda: False)
    monkeypatch.undo()
    assert learner.train(lambda: False).steps > 0
    assert all(torch.isfinite(p).all() for p in learner.trainer.parameters.values())
