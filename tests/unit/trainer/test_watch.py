"""The sampling watch: what may still arrive by verl's replay buffer, loads in the trace, and whom its end waits for."""

import json
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
from fake_fleet import FakeFleet

from verl_tlt.idle.replica_idle import ReplicaIdlePlanner
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.watch import LOAD_LINE_S, BufferWatch, PendingWork, SamplingWatch


class Buffer:
    """What is read of verl's buffer, and its way of looking: empty first, then filled."""

    def __init__(self, classified=None):
        self.filter_groups_metric = None if classified is None else "acc"
        self._dapo_classification_cache = {"train": classified}
        self.sync_refill_failed_groups = False
        self.pending_keys, self.running_keys, self.finished_keys = (defaultdict(set) for _ in range(3))
        self.meanwhile = lambda: None

    def _sync_metadata_from_transfer_queue(self):
        for keys in (self.pending_keys, self.running_keys, self.finished_keys):
            keys.clear()
        self.meanwhile()
        self.pending_keys["train"] |= {"p"}
        self.running_keys["train"] |= {"r", "s"}
        self.finished_keys["train"] |= {"f"}


@pytest.mark.parametrize(
    ("multi_turn", "classified", "wanted", "more"),
    [
        (True, None, 2, True), (False, None, 2, False), (False, {"f": None}, 2, True), (False, {"f": None}, 1, False),
        (False, {"f": 1.0}, 1, True), (False, {"of the last step": None}, 1, True), (False, {}, 1, True),
    ],
)  # fmt: skip
def test_what_may_still_arrive_is_counted_at_the_end_of_each_look(multi_turn, classified, wanted, more):
    """An agent loop may send another turn; filtering may ask for more groups until enough have a signal."""
    buffer, seen = Buffer(classified), []
    pending = BufferWatch(buffer, multi_turn=multi_turn, wanted=wanted)
    assert pending() == PendingWork(more=classified is not None)
    buffer._sync_metadata_from_transfer_queue()
    buffer.meanwhile = lambda: seen.append(pending())
    buffer._sync_metadata_from_transfer_queue()
    assert seen == [pending()] == [PendingWork(pending=1, more=more)], "in the middle of a look the last one holds"


@pytest.mark.parametrize("known", [(), ("_sync_metadata_from_transfer_queue", "pending_keys")])
def test_of_a_sampler_that_is_not_verls_the_worst_is_assumed(said, known):
    buffer = Buffer()
    sampler = SimpleNamespace(**{name: getattr(buffer, name) for name in known})
    assert BufferWatch(sampler, multi_turn=False, wanted=1)().more
    assert [record.message.endswith("no replica leaves early.") for record in said.records] == [True]


@pytest.fixture
def watched(tmp_path, clock):
    """Begin to watch a fleet of these replicas, each with one request."""

    def begin(*names, **settings):
        fleet = FakeFleet(*names, clock=clock)
        fleet.load |= dict.fromkeys(names, 1)
        planner = ReplicaIdlePlanner(names, expected_requests=len(names), settle_s=0.0, **settings)
        trace = TraceWriter(tmp_path, "trainer", clock.time)
        watch = SamplingWatch(fleet, planner, PendingWork, 0.002, trace, 1, clock=clock)
        clock.sleep(0.1)
        return watch, fleet

    return begin


@pytest.mark.parametrize(("replicas", "changes"), [(2, 5), (2000, 20)])
def test_every_change_of_load_is_written_and_of_a_large_fleet_fewer_and_the_last(watched, tmp_path, replicas, changes):
    watch, fleet = watched(*(f"replica-{i}" for i in range(replicas)), spot_workers=[])
    for n in range(changes + 1):
        fleet.load |= {"replica-0": n}
        fleet.clock.sleep(0.02)
    assert watch.finish(1.0).error is None
    written = [json.loads(line) for line in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    values = [line["inflight"]["replica-0"] for line in written if line["kind"] == "load"]
    assert values[-1] == changes and (values == [1, *range(changes + 1)] if replicas == 2 else len(values) < 20)
    apart = [b["t"] - a["t"] for a, b in pairwise(written[:-1])]
    assert all(seconds >= 0.9 * replicas * LOAD_LINE_S for seconds in apart)


@pytest.mark.parametrize(("sleep_s", "done"), [(0.0, "sleep a, train a, sleep b, train b"), (5.0, "sleep a")])
def test_one_that_sleeps_trains_before_the_next_is_asked_and_the_end_waits_for_no_other(watched, sleep_s, done):
    """The others that were to leave at the same look are put to sleep by verl, all at once, and train nothing."""
    watch, fleet = watched("a", "b", "serves")
    fleet.slow = {"try_sleep": sleep_s}
    fleet.load |= {"a": 0, "b": 0}
    fleet.clock.sleep(0.1)
    begin = fleet.clock.now
    report = watch.finish(1.0)
    assert fleet.clock.now - begin <= sleep_s and report.error is None
    order = [f"{call[0].removeprefix('try_')} {call[1]}" for call in fleet.calls if call[0] in ("try_sleep", "train")]
    assert ", ".join(order) == done
    assert {session.replica for session in report.sessions} == {name for (name,) in fleet.called("train")}
