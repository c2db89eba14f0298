"""Sessions whose micro-batches are drawn ahead: what was drawn and not used is as if it had not been.

A spot worker that rests holds what it has, not what its last session freed, and nobody waits for that.
"""

import asyncio
import sys
import threading

import psutil
import pytest
import torch
from tiny_learner import learner_arguments, make_learner, texts, verifier_arrays

from verl_tlt.spot_worker import learner as spot_learner
from verl_tlt.spot_worker import worker as spot_worker

MIB = 2**20


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


def stopped_after(learner, steps):
    until = learner.trainer.steps + steps
    return learner.train(lambda: learner.trainer.steps >= until)


def test_epochs_are_those_of_the_steps_taken(tmp_path):
    learner = make_learner(tmp_path / "policy", 24)
    whole = learner.train(lambda: False)
    assert whole.outcome == "exhausted" and whole.epochs == pytest.approx(1.0)
    parts = [stopped_after(learner, steps) for steps in (0, 1, whole.steps - 1)]
    assert [part.steps for part in parts] == [0, 1, whole.steps - 1]
    assert parts[0].epochs == 0.0 < parts[1].epochs < parts[2].epochs < 1.0


def test_the_next_sessions_order_does_not_hang_on_where_this_one_stopped(tmp_path, drawn):
    orders = []
    for steps in (0, 1, 1000):
        learner = make_learner(tmp_path / "policy", 24)
        stopped_after(learner, steps)
        drawn.clear()
        learner.train(lambda: False)
        orders.append(list(drawn))
    assert orders[0] == orders[1] == orders[2] and len(set(orders[0])) > 2


def test_what_fails_in_drawing_is_the_sessions_error(tmp_path, monkeypatch):
    learner = make_learner(tmp_path / "policy", 24)
    monkeypatch.setattr(learner.buffer, "sample_batch", lambda rng, budget: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learner.train(lambda: False)
    monkeypatch.undo()
    assert learner.train(lambda: False).steps > 0
    assert all(torch.isfinite(p).all() for p in learner.trainer.parameters.values())


@pytest.mark.skipif(sys.platform != "linux", reason="runs on Linux: it is about glibc's allocator")
def test_freed_pieces_go_back_to_the_system():
    resident = psutil.Process().memory_info
    pieces = [bytearray(b"x" * 50_000) for _ in range(4000)]
    left = pieces[::500]  # these keep the heap from shrinking by itself
    pieces.clear()
    held = resident().rss
    spot_worker.release_freed()
    assert held - resident().rss > 100 * MIB
    assert len(left) == 8


@pytest.mark.parametrize("fails", [False, True])
def test_a_session_answers_before_its_memory_goes_back(tmp_path, monkeypatch, fails):
    worker = spot_worker.SpotWorker(*learner_arguments(tmp_path), "cpu")
    worker.learner.add(1, texts(8), verifier_arrays())
    let_go, released = threading.Event(), threading.Event()

    def slow():
        assert let_go.wait(60)
        released.set()

    monkeypatch.setattr(spot_worker, "release_freed", slow)
    if fails:
        monkeypatch.setattr(worker.learner, "train", lambda should_stop: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(worker.train())
    else:
        assert asyncio.run(asyncio.wait_for(worker.train(), 30)).steps > 0
    assert not released.is_set()
    let_go.set()
    assert released.wait(60)
