"""What the long run concludes from what it looked at: growth, stops, overhead."""

import os
import random
import time

import pytest

from benchmarks.endurance import growth, overhead, stops
from benchmarks.process_sizes import SHM, SharedMemory, slope
from verl_tlt.trace.events import Session


def looks(memory, count=200):
    """Two processes that live on and one that comes late; `memory(i)` is the first one's."""
    for i in range(count):
        processes = {"worker 1": {"memory": memory(i), "threads": 9, "files": 20}}
        processes["driver 2"] = {"memory": 700.0, "threads": 30 + i // 10, "files": 50}
        if i > 100:
            processes["late 3"] = {"memory": 5.0 * i, "threads": 1, "files": 1}
        yield {"processes": processes, "shared_memory": 4, "objects": 12.5}


def test_a_slow_leak_is_seen_through_noise_that_is_far_larger():
    noise = random.Random(0)
    leak = growth(list(looks(lambda i: 900 + 0.2 * i + noise.uniform(-30, 30))), 150)
    assert not leak["series"]["memory of worker 1"]["flat"]
    assert leak["series"]["memory of worker 1"]["slope"] == pytest.approx(0.2, abs=0.1)
    flat = growth(list(looks(lambda i: 900 + noise.uniform(-3, 3))), 150)
    assert flat["series"]["memory of worker 1"]["flat"] and flat["came_or_went"] == 1
    assert not flat["series"]["threads of driver 2"]["flat"], "a thread every ten steps"
    assert flat["series"]["shared_memory"]["flat"] and flat["series"]["objects"]["flat"]


def test_one_jump_is_no_leak():
    assert slope([100.0] * 60 + [180.0] * 90) == 0.0 == slope([5.0])
    assert growth(list(looks(lambda i: 900 + 50.0 * (i > 100))), 150)["series"]["memory of worker 1"]["flat"]


def session(latency, slowest, steps=10):
    return Session(
        t=1.0, step=1, replica="a", start=0.0, end=2.0, steps=steps, tokens=9, outcome="stopped",
        stop_latency_s=latency, slowest_s=slowest,
    )  # fmt: skip


def test_a_stop_is_judged_by_its_own_sessions_longest_micro_batch():
    found = stops([session(0.30, 0.25), session(0.30, 0.10), session(None, 0.2), session(0.1, 0.0, steps=0)])
    assert (found["sessions"], found["stopped"], found["within_bound"]) == (4, 2, 1)
    assert found["beyond_the_longest_micro_batch_s"]["max"] == pytest.approx(0.2)


def test_overhead_is_a_share_of_the_step_and_leaves_the_first_out():
    step = {"timing_s/step": 4.0, "tlt/overhead_s": 0.02, "tlt/overhead_tap_s": 0.02}
    found = overhead({1: {**step, "tlt/overhead_s": 9.0}, 2: step, 3: {**step, "tlt/overhead_save_s": 0.1}})
    assert found["share"] == pytest.approx(0.005) and found["phases"]["tap"]["share"] == pytest.approx(0.005)
    assert found["phases"]["save"] == {"median_s": 0.05, "share": 0.0125}


def test_entries_of_shared_memory_are_told_from_other_peoples():
    shm = SharedMemory()
    path = SHM / f"tlt-test-{os.getpid()}-{time.time_ns()}"
    try:
        path.write_bytes(b"x")
        assert shm.count([os.getpid()]) == 1
        path.unlink()
        assert shm.count([os.getpid()]) == 0
        with path.open("wb"):
            assert SharedMemory().count([os.getpid()]) == 0, "it was there before"
            path.with_suffix(".other").write_bytes(b"x")
    finally:
        path.unlink(missing_ok=True)
        path.with_suffix(".other").unlink(missing_ok=True)
