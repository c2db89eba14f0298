"""Loads in the trace: every change of a small fleet, and no flood from a large one."""

import json
from itertools import pairwise

from fake_clock import FakeClock
from fake_fleet import FakeFleet

from verl_tlt.idle.replica_idle import ReplicaIdlePlanner
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.watch import LOAD_LINE_S, PendingWork, SamplingWatch


def loads(tmp_path, replicas, changes):
    """Lines of load: of none, after so many changes of it, each seen by the watch, and of the last one."""
    clock = FakeClock()
    fleet = FakeFleet(*(f"replica-{i}" for i in range(replicas)), clock=clock)
    planner = ReplicaIdlePlanner(list(fleet.replicas), expected_requests=1, settle_s=1.0, spot_workers=[])
    trace = TraceWriter(tmp_path, "trainer", clock.time)
    watch = SamplingWatch(fleet, planner, PendingWork, 0.002, trace, 1, clock=clock)
    for n in range(changes + 1):
        fleet.load |= {"replica-0": n}
        clock.sleep(0.02)
    assert watch.finish(1.0).error is None
    lines = [json.loads(line) for line in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "load"]


def test_every_change_of_a_small_fleet_is_written(tmp_path):
    written = loads(tmp_path, 2, 5)
    assert [line["inflight"]["replica-0"] for line in written] == [0, 1, 2, 3, 4, 5]


def test_a_large_fleet_writes_less_often_and_its_last_load(tmp_path):
    written = loads(tmp_path, 2000, 20)
    assert len(written) < 20 and written[-1]["inflight"]["replica-0"] == 20
    apart = [b["t"] - a["t"] for a, b in pairwise(written[:-1])]
    assert all(seconds >= 0.9 * 2000 * LOAD_LINE_S for seconds in apart)
