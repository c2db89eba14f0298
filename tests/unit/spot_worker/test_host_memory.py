"""A spot worker that rests holds what it has, not what its last session freed, and nobody waits for that."""

import asyncio
import sys
import threading

import psutil
import pytest
from tiny_learner import learner_arguments, texts, verifier_arrays

from verl_tlt.spot_worker import worker as spot_worker

MIB = 2**20


@pytest.fixture
def worker(tmp_path):
    """With something to train on."""
    worker = spot_worker.SpotWorker(*learner_arguments(tmp_path), "cpu")
    worker.learner.add(1, texts(8), verifier_arrays())
    return worker


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


def test_a_session_answers_before_its_memory_goes_back(worker, monkeypatch):
    let_go, released = threading.Event(), threading.Event()

    def slow():
        assert let_go.wait(60)
        released.set()

    monkeypatch.setattr(spot_worker, "release_freed", slow)
    assert asyncio.run(asyncio.wait_for(worker.train(), 30)).steps > 0
    assert not released.is_set()
    let_go.set()
    assert released.wait(60)


def test_memory_goes_back_after_a_session_that_failed(worker, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(spot_worker, "release_freed", released.set)
    monkeypatch.setattr(worker.learner, "train", lambda should_stop: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(worker.train())
    assert released.wait(60)
