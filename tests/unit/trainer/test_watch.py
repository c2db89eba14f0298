"""The sampling watch: what may still arrive by verl's replay buffer, and loads in the trace."""

import json
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
from fake_clock import FakeClock
from fake_fleet import FakeFleet

from verl_tlt.idle.replica_idle import ReplicaIdlePlanner
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.watch import LOAD_LINE_S, BufferWatch, PendingWork, SamplingWatch, logger


class Buffer:
    """What is read of verl's buffer, and its way of looking: empty first, then filled."""

    def __init__(self, filtering: bool = False) -> None:
        self.filter_groups_metric = "acc" if filtering else None
        self.sync_refill_failed_groups = False
        self.pending_keys, self.running_keys, self.finished_keys = (defaultdict(set) for _ in range(3))
        self.meanwhile = lambda: None

    def _sync_metadata_from_transfer_queue(self) -> None:
        for keys in (self.pending_keys, self.running_keys, self.finished_keys):
            keys.clear()
        self.meanwhile()
        self.pending_keys["train"] |= {"p"}
        self.running_keys["train"] |= {"r", "s"}
        self.finished_keys["train"] |= {"f"}


@pytest.mark.parametrize("multi_turn", [True, False])
def test_what_is_counted(multi_turn):
    buffer = Buffer()
    pending = BufferWatch(buffer, multi_turn=multi_turn, wanted=2)
    assert pending() == PendingWork()
    buffer._sync_metadata_from_transfer_queue()
    assert pending() == PendingWork(pending=1, more=multi_turn)


def test_in_the_middle_of_a_look_the_last_one_holds():
    buffer = Buffer()
    pending = BufferWatch(buffer, multi_turn=True, wanted=2)
    buffer._sync_metadata_from_transfer_queue()
    seen = []
    buffer.meanwhile = lambda: seen.append(pending())
    buffer._sync_metadata_from_transfer_queue()
    assert seen == [PendingWork(pending=1, more=True)]


@pytest.mark.parametrize(("filtering", "wanted", "possible"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_filtering_may_ask_for_more_groups_until_there_are_enough(filtering, wanted, possible):
    buffer = Buffer(filtering)
    pending = BufferWatch(buffer, multi_turn=False, wanted=wanted)
    buffer._sync_metadata_from_transfer_queue()
    assert pending().more is possible


@pytest.mark.parametrize("known", [(), ("_sync_metadata_from_transfer_queue", "pending_keys")])
def test_of_a_sampler_that_is_not_verls_the_worst_is_assumed(monkeypatch, known):
    said, buffer = [], Buffer()
    monkeypatch.setattr(logger, "warning", lambda message, *args: said.append(message % args))
    sampler = SimpleNamespace(**{name: getattr(buffer, name) for name in known})
    assert BufferWatch(sampler, multi_turn=False, wanted=1)().more
    assert len(said) == 1 and "no replica leaves early" in said[0]


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


def test_the_end_of_sampling_waits_for_one_that_falls_asleep_and_for_no_more(tmp_path):
    """The others that were to leave at the same look are put to sleep by verl, all at once, and train nothing."""
    clock, names = FakeClock(), ("a", "b", "c", "serves")
    fleet, sleep_s = FakeFleet(*names, clock=clock), 5.0
    fleet.slow = {"try_sleep": sleep_s}
    fleet.load |= dict.fromkeys(names, 1)
    planner = ReplicaIdlePlanner(names, expected_requests=4, settle_s=0.0)
    watch = SamplingWatch(fleet, planner, PendingWork, 0.002, TraceWriter(tmp_path, "t", clock.time), 1, clock=clock)
    clock.sleep(0.1)
    fleet.load |= dict.fromkeys(("a", "b", "c"), 0)
    clock.sleep(0.1)
    begin = clock.now
    report = watch.finish(1.0)
    assert clock.now - begin < sleep_s and report.error is None
    assert [call[1] for call in fleet.calls if call[0] == "try_sleep"] == ["a"]
    assert report.sessions == [] and not [call for call in fleet.calls if call[0] == "train"]


def test_one_that_sleeps_trains_before_the_next_is_asked_to_sleep(tmp_path):
    clock, names = FakeClock(), ("a", "b", "serves")
    fleet = FakeFleet(*names, clock=clock)
    fleet.load |= dict.fromkeys(names, 1)
    planner = ReplicaIdlePlanner(names, expected_requests=3, settle_s=0.0)
    watch = SamplingWatch(fleet, planner, PendingWork, 0.002, TraceWriter(tmp_path, "t", clock.time), 1, clock=clock)
    clock.sleep(0.1)
    fleet.load |= dict.fromkeys(("a", "b"), 0)
    clock.sleep(0.1)
    order = [call[:2] for call in fleet.calls if call[0] in ("try_sleep", "train")]
    assert order == [("try_sleep", "a"), ("train", "a"), ("try_sleep", "b"), ("train", "b")]
    watch.finish(1.0)
