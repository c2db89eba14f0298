"""Sampling watched on real actors: verl's balancer and placement groups, real spot workers, one of which misbehaves.

The servers are stand-ins that always agree to sleep; tests/e2e/test_leaving.py has the real ones.
"""

import os
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recorded import (
    CONFIG,
    Odd,
    as_shards,
    begin_anew,
    drafted,
    optimizer_steps,
    ray_cluster,
    record,
    score,
    score_alone,
    set_epochs,
    steps_taken,
    worker_arguments,
)
from stand_in_server import Server

from verl_tlt.drafter import most_frequent
from verl_tlt.idle.replica_idle import ReplicaIdlePlanner, State
from verl_tlt.messages.training import DrafterProvenance, TappedStates, TapReady
from verl_tlt.trace.events import Session, TraceWriter
from verl_tlt.trainer.waits import SILENT_S

pytestmark = pytest.mark.engine

ray = pytest.importorskip("ray")

REPLICAS = ("long", "short", "brief")
BOUND_S = 5.0
"""What the trainer waits for a stop, as it does by default: many micro-batches, also beside workers that start."""


@pytest.fixture(scope="module")
def recorded():
    return record(36, seed=0)


def started(names, devices, balancer=None, store=None, config=CONFIG):
    """The trainer's fleet over stand-in servers, each of so many devices, in verl's own placement groups."""
    from verl.single_controller.ray import RayResourcePool

    from verl_tlt.trainer.run_setup import SpotPlan
    from verl_tlt.trainer.spot_workers import Fleet

    servers = {name: ray.remote(Server).options(num_cpus=0).remote() for name in names}
    replicas = [
        SimpleNamespace(_server_address=name, _server_handle=server, servers=[server])
        for name, server in servers.items()
    ]
    world = len(names) * devices
    manager = SimpleNamespace(
        get_replicas=lambda: replicas,
        global_load_balancer=balancer and ray.remote(balancer).options(num_cpus=0).remote(dict(servers)),
    )
    ready = [ray.put(TapReady(group=rank)) for rank in range(world)]
    actor = SimpleNamespace(world_size=world, tlt_setup=lambda *_: ready)
    spot = SpotPlan(**worker_arguments(config=config))
    store = store and ray.remote(store).options(num_cpus=0).remote(spot.drafter)
    fleet = Fleet(manager, actor, store, RayResourcePool([world], max_colocate_count=2), spot)
    assert fleet.start_spot((3, 5, 7), None, counts_tokens=False) is None
    return fleet


@pytest.fixture(scope="module")
def fleet(recorded):
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        from verl_tlt.trainer import spot_workers as module
        from verl_tlt.trainer.servers import DrafterStore

        patch.setattr(module, "SpotWorker", Odd)
        fleet = started(REPLICAS, 1, GlobalRequestLoadBalancer, DrafterStore)
        fill(fleet, recorded, fleet.replicas)
        yield fleet


@pytest.fixture(scope="module")
def wide():
    """A replica on two devices, alone; its drafter can draft a part of the policy's tokens."""
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        fleet = started(["wide"], 2, config=replace(CONFIG, drafter=replace(CONFIG.drafter, vocab=24)))
        wait_for(lambda: not fleet.spot_workers["wide"].starting())
        yield fleet
        for worker in fleet.spot_workers["wide"].handles.values():
            ray.kill(worker)


def fill(fleet, recorded, names):
    sequences, weights = recorded
    shards, arrays = ray.put(as_shards(sequences)), ray.put(weights)
    ray.get([fleet.spot_workers[n].first().add.remote(1, [[shards]], arrays) for n in names], timeout=300)


@pytest.fixture
def phase(fleet, recorded, tmp_path):
    """Start watching a phase in which only `long` is still serving; whoever left comes back afterwards."""
    from verl_tlt.trainer.watch import PendingWork, SamplingWatch

    ray.get([r.first().__ray_call__.remote(begin_anew) for r in fleet.spot_workers.values()], timeout=300)
    requests = [(f"request-{time.time()}-{i}", None) for i in range(2 * len(REPLICAS))]
    held = [(ray.get(fleet.balancer.acquire_server.remote(request))[0], request) for request, _ in requests]
    watches = []

    def start(recall=False, **faults):
        """Sessions last until they are stopped."""
        ray.get([r.first().__ray_call__.remote(set_epochs, 1e9) for r in fleet.spot_workers.values()], timeout=300)
        for name, fault in faults.items():
            ray.get(fleet.spot_workers[name].first().be.remote(fault), timeout=300)
        planner = ReplicaIdlePlanner(REPLICAS, expected_requests=6, settle_s=0.05)
        watch = SamplingWatch(fleet, planner, PendingWork, 0.02, TraceWriter(tmp_path, "trainer"), 1, recall)
        watches.append(watch)
        wait_for(lambda: watch.report.first_dispatch)
        for server, request in held:
            if server != "long":
                ray.get(fleet.balancer.release_server.remote(server, request))
        return watch

    yield start
    for server, request in held:
        ray.get(fleet.balancer.release_server.remote(server, request))
    for watch in watches:
        watch._end.set()
        watch._thread.join(10)
    fleet.rejoin(REPLICAS)


def wait_for(condition, seconds=300):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "it did not happen in time"
        time.sleep(0.02)


def trained(fleet, name, steps=12):
    """Whether a session has come that far."""
    return ray.get(fleet.spot_workers[name].first().__ray_call__.remote(steps_taken), timeout=300) >= steps


def move_on(fleet):
    """Bring all workers to an agreed version that is not the first one."""
    worker = fleet.spot_workers["long"].first()
    ray.get(worker.__ray_call__.remote(set_epochs, 0.7))
    assert ray.get(worker.train.remote(), timeout=300).steps >= CONFIG.spot.min_merge_steps
    assert fleet.merge(["long"]).included == ("long",)
    agreed = ray.get(worker.versions.remote())
    assert any((value != agreed.initial[name]).any() for name, value in agreed.candidate.items())


def assert_alike(fleet):
    """All workers hold the same candidate, served and initial parameters."""
    first, *others = ray.get([r.first().versions.remote() for r in fleet.spot_workers.values()], timeout=300)
    for other in others:
        for which in ("candidate", "served", "initial"):
            for name, value in first.of(which).items():
                np.testing.assert_array_equal(other.of(which)[name], value)


def test_idle_replicas_train_and_what_they_learned_is_published(fleet, phase):
    watch = phase()
    wait_for(lambda: watch.planner.state("short") is watch.planner.state("brief") is State.TRAINING)
    assert set(fleet.inflight()) == {"long"}, "a replica that left is still in the balancer"
    wait_for(lambda: trained(fleet, "short") and trained(fleet, "brief"))
    report = watch.finish(BOUND_S)
    assert report.error is None
    assert {s.replica for s in report.sessions} == {"short", "brief"}
    assert all(s.error is None and s.steps > 0 for s in report.sessions)
    assert report.account.failures == 0
    assert report.account.used_s["short"] > 0.5 * report.account.bubble_s["short"]
    merged = update(fleet, report.sessions, 1)
    assert (merged.decision, merged.excluded) == ("kept", {})
    ray.get(fleet.spot_workers["short"].first().__ray_call__.remote(score_alone))
    learned = update(fleet, [session(fleet, "short")], 1)
    assert learned.decision == "published"
    assert learned.tau["candidate"] > learned.tau["served"]
    assert len(learned.acceptance) == 3
    assert_alike(fleet)
    fleet.stage(learned.drafter)
    assert ray.get([r.server.staged.remote() for r in fleet.replicas.values()]) == [1, 1, 1]


def test_to_ask_for_the_load_leaves_no_record_in_rays_store(fleet):
    """It is asked many times a second, however long a run is."""

    def calls():
        return sum(event["cat"].endswith(".get_status") for event in ray.timeline())

    own = fleet.balancer.get_status
    ray.get([own.remote() for _ in range(3)])
    for _ in range(3):
        fleet.inflight()
    ray.get(own.remote())
    wait_for(lambda: calls() >= 4)
    time.sleep(2.0)  # Ray sends them every second
    assert calls() == 4


def test_the_next_session_judges_and_its_own_work_waits(fleet):
    workers = [r.first() for r in fleet.spot_workers.values()]
    ray.get([w.__ray_call__.remote(begin_anew) for w in workers], timeout=300)
    merged = update(fleet, [session(fleet, "short")], 7)
    assert (merged.drafter, merged.reason) == (None, "merged, and the next session scores it")
    candidate = ray.get(workers[0].export.remote(7, "bfloat16", [])).weights
    scored = session(fleet, "short")
    assert scored.steps > 0 and scored.scores is not None
    learned = update(fleet, [scored], 7)
    assert learned.decision == "published" and learned.drafter.weights == candidate
    fleet.keep_as_served()
    assert_alike(fleet)
    agreed = ray.get(workers[0].versions.remote())
    assert any((value != agreed.served[name]).any() for name, value in agreed.candidate.items())


def update(fleet, sessions, version):
    """What becomes of these sessions, where a publication gets the number `version`."""
    from verl_tlt.trainer.drafter_update import DrafterUpdates
    from verl_tlt.trainer.step_log import StepLog

    served = DrafterProvenance("policy", "data", "hass", 1.0, version=version - 1)
    return DrafterUpdates(fleet, CONFIG, served, "bfloat16", StepLog(None)).update(sessions)


def session(fleet, name):
    """One pass over its buffer."""
    begin = time.time()
    result, end = fleet.train(name).result(300), time.time()
    return Session(**vars(result), t=end, step=1, replica=name, start=begin, end=end)


def test_late_requests_meet_the_whole_fleet(fleet, phase):
    watch = phase(recall=True)
    wait_for(lambda: watch.planner.state("short") is watch.planner.state("brief") is State.TRAINING)
    wait_for(lambda: trained(fleet, "short", steps=1))
    start = time.time()
    watch.recall(BOUND_S)
    assert time.time() - start < BOUND_S + 1.0
    # When the trainer goes on, everybody serves again, and what they had learned is kept.
    assert set(fleet.inflight()) == set(REPLICAS)
    assert not any(ray.get([r.server.sleeps.remote() for r in fleet.replicas.values()]))
    request = f"late-{time.time()}"
    server = ray.get(fleet.balancer.acquire_server.remote(request))[0]
    assert server in ("short", "brief"), "the replica with the least to do"
    ray.get(fleet.balancer.release_server.remote(server, request))
    report = watch.finish(BOUND_S)
    assert report.error is None and report.account.failures == 0
    assert {s.replica for s in report.sessions} == {"short", "brief"}
    assert sum(report.account.used_s.values()) > 0.0


def test_one_that_slept_without_its_weights_is_not_called_back(fleet, phase):
    watch = phase(recall=False)
    wait_for(lambda: watch.planner.state("short") is watch.planner.state("brief") is State.TRAINING)
    watch.recall(BOUND_S)
    assert set(fleet.inflight()) == {"long"}
    assert watch.finish(BOUND_S).account.failures == 2
    ray.get([r.server.tlt_try_sleep.remote(True) for r in fleet.replicas.values()])
    ray.get([r.server.tlt_recall.remote() for r in fleet.replicas.values()])


def test_a_session_that_raises_costs_its_replica_the_phase_and_nothing_else(fleet, phase):
    watch = phase(short="broken")
    wait_for(lambda: watch.report.sessions)
    wait_for(lambda: watch.planner.state("brief") is State.TRAINING)
    report = watch.finish(BOUND_S)
    assert report.error is None
    assert report.account.failures == 1
    by_replica = {s.replica: s for s in report.sessions}
    assert "out of luck" in by_replica["short"].error
    assert by_replica["brief"].error is None
    ray.get(fleet.spot_workers["short"].first().be.remote(""))


def test_a_worker_that_does_not_stop_is_killed_and_its_successor_joins_the_others(fleet, phase, recorded):
    restarts = fleet.spot_workers["short"].restarts
    move_on(fleet)
    watch = phase(short="deaf")
    wait_for(lambda: trained(fleet, "short") and trained(fleet, "brief"))
    start = time.time()
    report = watch.finish(BOUND_S)
    assert BOUND_S <= time.time() - start < BOUND_S + 1.0, "the trainer waits for its bound"
    assert fleet.spot_workers["short"].restarts == restarts + 1
    by_replica = {s.replica: s for s in report.sessions}
    assert f"did not stop within {BOUND_S} s" in by_replica["short"].error
    assert by_replica["brief"].stop_latency_s < BOUND_S
    assert report.account.failures == 1
    # The others have moved on from the first drafter; one that starts there would merge and publish another version.
    learned = update(fleet, report.sessions, 2)
    assert learned.drafter is not None
    assert_alike(fleet)
    fill(fleet, recorded, ["short"])
    assert ray.get(fleet.spot_workers["short"].first().train.remote(), timeout=300).steps > 0


@pytest.mark.parametrize("fault", ["dying", "sick"])
def test_a_worker_whose_process_dies_is_replaced(fleet, phase, recorded, fault):
    """As one does whose device it can use no more."""
    all_up(fleet)
    fill(fleet, recorded, ["brief"])
    restarts = fleet.spot_workers["brief"].restarts
    move_on(fleet)
    watch = phase(brief=fault)
    wait_for(lambda: fleet.spot_workers["brief"].restarts == restarts + 1)
    report = watch.finish(BOUND_S)
    assert report.error is None
    by_replica = {s.replica: s for s in report.sessions}
    assert "Actor" in by_replica["brief"].error
    assert report.account.failures == 1
    assert_alike(fleet)


def test_workers_that_replaced_others_are_those_to_warm_up(fleet, monkeypatch):
    on_cuda = replace(fleet.spot, device="cuda")
    all_up(fleet)
    assert fleet.unrehearsed() == [], "a processor has nothing to warm up"
    with monkeypatch.context() as patch:
        patch.setattr(fleet, "spot", on_cuda)
        names = fleet.unrehearsed()
        assert fleet.waits.answers("warm-up", fleet.warm_up(names), 300).keys() == set(names)
        assert fleet.unrehearsed() == []
    fleet.restart(["brief"])
    monkeypatch.setattr(fleet, "spot", on_cuda)
    assert fleet.unrehearsed() == ["brief"] and fleet.unrehearsed(up=True) == []
    wait_for(lambda: fleet.unrehearsed(up=True) == ["brief"])
    fleet.waits.answers("warm-up", fleet.warm_up(["brief"]), 300)
    assert fleet.unrehearsed() == []


def kill(worker):
    """Returns once it is dead: a call that is made right behind `ray.kill` may still be answered."""
    ray.kill(worker)
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(600):
            ray.get(worker.stop.remote(), timeout=300)
            time.sleep(0.05)


def test_when_all_workers_die_their_successors_start_from_what_is_served(fleet):
    move_on(fleet)
    published = ray.get(fleet.spot_workers["long"].first().export.remote(5, "bfloat16", []))
    fleet.stage(published)
    before = ray.get(fleet.spot_workers["long"].first().versions.remote()).initial
    for workers in fleet.spot_workers.values():
        kill(workers.first())
    fleet.keep_as_served()  # finds nobody alive
    assert_alike(fleet)
    successor = fleet.spot_workers["brief"].first()
    assert ray.get(successor.export.remote(6, "bfloat16", [])).weights == published.weights
    agreed = ray.get(successor.versions.remote())
    for name, value in before.items():
        np.testing.assert_array_equal(agreed.served[name], agreed.candidate[name])
        np.testing.assert_array_equal(agreed.initial[name], value)


def test_a_worker_that_a_merge_waits_for_is_replaced_once(fleet, monkeypatch):
    """The trainer's thread kills it, and the background sees it die."""
    restarts, handles = fleet.spot_workers["long"].restarts, fleet.spot_workers["long"].handles
    os.kill(ray.get(fleet.spot_workers["long"].first().__ray_call__.remote(lambda worker: os.getpid())), signal.SIGSTOP)
    reverting = threading.Thread(target=fleet.revert, args=("served",))
    reverting.start()
    die = ray.kill

    def die_in_sight_of_the_merge(worker):
        die(worker)
        if threading.current_thread() is not reverting:
            reverting.join(20.0)

    monkeypatch.setattr(ray, "kill", die_in_sight_of_the_merge)
    fleet.restart(["long"])
    assert not reverting.is_alive() and fleet.spot_workers["long"].handles is not handles
    assert fleet.spot_workers["long"].restarts == restarts + 1
    assert_alike(fleet)


def process(fleet, name):
    return ray.get(fleet.spot_workers[name].first().__ray_call__.remote(lambda worker: os.getpid()), timeout=300)


def all_up(fleet):
    ray.get([r.first().__ray_ready__.remote() for r in fleet.spot_workers.values()], timeout=300)


def test_workers_that_are_stopped_or_killed_while_idle_cost_a_step_two_seconds_and_are_counted(fleet, tmp_path):
    all_up(fleet)
    list(fleet.waits.failures())
    os.kill(process(fleet, "long"), signal.SIGSTOP)
    os.kill(process(fleet, "short"), signal.SIGKILL)
    begin = time.monotonic()
    fleet.keep_as_served()
    assert time.monotonic() - begin < SILENT_S + 1.0
    assert {(f.replica, f.during) for f in fleet.waits.failures()} == {("long", "publish"), ("short", "publish")}
    all_up(fleet)
    assert_alike(fleet)
    os.kill(process(fleet, "long"), signal.SIGSTOP)
    begin = time.monotonic()
    provenance = DrafterProvenance("policy", "data", "hass", 1.0)
    calls = fleet.save(tmp_path / "global_step_1" / "tlt_drafter", provenance)
    assert time.monotonic() - begin < SILENT_S + 1.0
    assert [(f.replica, f.during) for f in fleet.waits.failures()] == [("long", "save")]
    assert calls.keys() <= {"short", "brief"} and fleet.waits.answers("save", calls, 60.0).keys() == calls.keys()
    assert (tmp_path / "global_step_1" / "tlt_drafter" / "model.safetensors").is_file(), "another one writes it"
    all_up(fleet)


def test_a_checkpoint_has_the_optimizer_of_the_worker_that_trained_the_longest(fleet, recorded, tmp_path):
    all_up(fleet)
    workers = [r.first() for r in fleet.spot_workers.values()]
    ray.get([w.__ray_call__.remote(begin_anew) for w in workers], timeout=300)
    fill(fleet, recorded, ["brief"])
    assert session(fleet, "brief").steps > 0
    trained = ray.get(workers[-1].__ray_call__.remote(optimizer_steps))
    directory = tmp_path / "global_step_1" / "tlt_drafter"
    calls = fleet.save(directory, DrafterProvenance("policy", "data", "hass", 1.0))
    assert calls.keys() == {"brief"} and fleet.waits.answers("save", calls, 60.0)
    ray.get([w.__ray_call__.remote(begin_anew) for w in workers], timeout=300)
    held = ray.get([w.resume.remote(str(directory)) for w in workers], timeout=300)
    assert len(set(held)) == 1 and held[0].steps == trained[0] > 0
    assert ray.get([w.__ray_call__.remote(optimizer_steps) for w in workers]) == [trained] * 3


def taken_by_two(recorded):
    """What two ranks took, the first of which copies the verifier weights for both."""
    sequences, weights = recorded
    arrays = ray.put(weights)
    return [
        TappedStates((ray.put(as_shards(sequences[rank::2])),), arrays if rank == 0 else None, seconds=0.0, errors=0)
        for rank in range(2)
    ]


def test_every_device_of_a_replica_trains_on_its_share(wide, recorded):
    sequences = recorded[0]
    assert (len(wide.replicas["wide"].ranks), list(wide.spot_workers["wide"].handles)) == (2, ["wide", "wide/1"])
    taken = taken_by_two(recorded)
    said = torch.cat([s.tokens[s.prompt_len :] for s in sequences])
    ids = most_frequent(torch.bincount(said, minlength=64), 24).numpy()
    wide.choose_tokens(ids)
    stats = wide.hand_over(1, taken)["wide"].result(300)
    assert (stats.sequences, stats.incomplete) == (len(sequences), 0)
    assert (stats.responses, stats.draftable) == (len(said), int(np.isin(said, ids).sum()))
    workers = list(wide.spot_workers["wide"].handles.values())
    assert ray.get([w.__ray_call__.remote(drafted) for w in workers]) == [ids.tolist()] * 2
    ray.get([w.__ray_call__.remote(set_epochs, 1e9) for w in workers], timeout=300)
    session = wide.train("wide")
    wait_for(lambda: min(ray.get([w.__ray_call__.remote(steps_taken) for w in workers], timeout=300)) >= 3)
    assert wide.first_done({"wide": session}, 0.05) == []
    wide.stop("wide")
    assert wide.first_done({"wide": session}, 60) == ["wide"]
    found = session.result(1)
    assert (found.outcome, found.steps) == (
        "stopped",
        sum(ray.get([w.__ray_call__.remote(steps_taken) for w in workers])),
    )
    assert found.devices > 1.5
    assert wide.merge(["wide"]).included == ("wide", "wide/1")
    ray.get([w.__ray_call__.remote(score_alone) for w in workers])
    each = ray.get([w.__ray_call__.remote(score) for w in workers])
    assert len(wide.train("wide").result(300).scores.positions) == sum(len(own.positions) for own in each) > 0
    wide.restart(["wide"])
    successors = wide.spot_workers["wide"].handles.values()
    assert ray.get([w.__ray_call__.remote(drafted) for w in successors]) == [ids.tolist()] * 2


def test_workers_that_replaced_others_train_on_verifier_weights_that_the_others_had_before(wide, recorded):
    """Under LoRA they are copied once, and a rank hands over the same ones in every step: nobody loads them again."""
    taken = taken_by_two(recorded)

    def hand_over(step):
        wait_for(lambda: not wide.spot_workers["wide"].starting())
        wide.hand_over(step, taken)["wide"].result(300)
        workers = wide.spot_workers["wide"].handles.values()
        return ray.get([w.__ray_call__.remote(lambda worker: id(worker.learner.whole_head)) for w in workers])

    assert hand_over(2) == hand_over(3)
    wide.restart(["wide"])
    hand_over(4)
    assert wide.train("wide").result(300).steps > 0
