"""Loads in the trace: every change of a small fleet, and no flood from a large one."""

import json
import time
from itertools import pairwise

from fake_fleet import FakeFleet
from rl_steps import until

from verl_tlt.idle.replica_idle import ReplicaIdlePlanner
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.pending_work import PendingWork
from verl_tlt.trainer.watch import LOAD_LINE_S, SamplingWatch


def loads(tmp_path, replicas, changes, apart=0.0):
    """Lines of load: of none, after so many changes of it, each seen by the watch and `apart` seconds from the next,
    and of the last one."""
    fleet = FakeFleet(*(f"replica-{i}" for i in range(replicas)))
    planner = ReplicaIdlePlanner(list(fleet.places), expected_requests=1, settle_s=1.0, buffer_ready=False)
    watch = SamplingWatch(fleet, planner, PendingWork, 0.002, TraceWriter(tmp_path, "trainer"), 1)
    for n in range(changes + 1):
        fleet.load |= {"replica-0": n}
        until(lambda: watch._load == fleet.load)
        time.sleep(apart)
    assert watch.finish(1.0).error is None
    lines = [json.loads(line) for line in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "load"]


def test_every_change_of_a_small_fleet_is_written(tmp_path):
    written = loads(tmp_path, 2, 5, apart=2 * LOAD_LINE_S)
    assert [line["inflight"]["replica-0"] for line in written] == [0, 1, 2, 3, 4, 5]


def test_a_large_fleet_writes_less_often_and_its_last_load(tmp_path):
    written = loads(tmp_path, 2000, 20)
    assert len(written) < 20 and written[-1]["inflight"]["replica-0"] == 20
    apart = [b["t"] - a["t"] for a, b in pairwise(written[:-1])]
    assert all(seconds >= 0.9 * 2000 * LOAD_LINE_S for seconds in apart)
