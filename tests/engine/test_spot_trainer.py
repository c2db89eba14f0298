"""The spot trainer in Ray, as the RL trainer uses it: it learns, stops, publishes and is replaced."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from recorded import Odd, as_shards, plan_of, ray_cluster, record, sequences_kept, served_version, set_epochs, wait_for

from verl_tlt.drafter import load_drafter
from verl_tlt.messages.training import CapturedStates, CaptureReady, DrafterProvenance
from verl_tlt.trainer import spot as module
from verl_tlt.trainer.servers import Servers
from verl_tlt.trainer.spot import MEMORY_S, SAVE_S, STRIKES, Place, SpotTrainerHandle
from verl_tlt.trainer.waits import CallFailed, is_gone

pytestmark = pytest.mark.engine

ray = pytest.importorskip("ray")

FACTS = DrafterProvenance("policy", "data", "hass", 1.0)
SHORT, EPOCHS, ENDLESS = 0.2, 2.5, 1e9


@pytest.fixture(scope="module")
def recorded():
    return record(72, seed=0)


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        patch.setattr(module, "SpotTrainerWorker", Odd)
        yield ray.get_runtime_context().get_node_id()


@pytest.fixture(scope="module")
def shared(cluster, recorded):
    """The one that all tests have in turn, since a start takes longer than most of them; it has what two ranks
    captured."""
    spot = SpotTrainerHandle(plan_of(max_epochs=SHORT))
    ranks = [CaptureReady(0, cluster, "0"), CaptureReady(1, cluster, "1")]
    spot.start(ranks, {"long": [0], "short": [1]})
    wait_for(spot.started)
    feed(spot, recorded)
    yield spot
    spot.close()


@pytest.fixture
def spot(shared, recorded):
    """The shared one: up, with hidden states, and after a short good session where a test before failed it."""
    wait_for(shared.started)
    of_worker(shared, set_epochs, SHORT)
    if shared.failures:
        feed(shared, recorded)
        assert session(shared).steps > 0
        shared.failures.clear()
    return shared


def captured(recorded):
    """Each rank's capture is an object of its own; the first one brings the verifier weights."""
    sequences, weights = recorded
    return [
        CapturedStates(ray.put(as_shards(sequences[rank::2])), ray.put(weights) if rank == 0 else None, 0.0, 0)
        for rank in range(2)
    ]


def feed(spot, recorded, step=1):
    spot.add(step, captured(recorded))
    wait_for(spot.ready)


def of_worker(spot, function, *arguments):
    return ray.get(spot._actor.__ray_call__.remote(function, *arguments), timeout=300)


def session(spot, replica="short"):
    spot.train(replica)
    result = spot.ended(300)
    assert result is not None
    return result


def exported(spot):
    spot.export()
    wait_for(lambda: module.arrived(spot._export[0]))
    return spot.exported()


# ---------------------------------------------------------------------- the verbs


def test_what_it_captured_is_learned_judged_published_and_saved(spot, tmp_path):
    assert (of_worker(spot, sequences_kept), spot.stats.incomplete) == (72, 0), "a rank's capture was left out"
    of_worker(spot, set_epochs, EPOCHS)
    first = session(spot)
    assert first.outcome == "exhausted" and first.steps >= 10 and first.skipped == 0 and first.verdict is None
    second = session(spot)
    assert second.verdict.publishes and second.verdict.tau["candidate"] > second.verdict.tau["served"] + 0.2
    found = exported(spot)
    drafter = ray.get(spot.published)
    assert found.version == drafter.version == 1 and found.acceptance == drafter.acceptance == second.verdict.acceptance
    spot.save(tmp_path / "global_step_1" / "tlt_drafter", FACTS)
    load_drafter(tmp_path / "global_step_1" / "tlt_drafter", plan_of().policy_dir)
    assert spot.failures == []


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="runs on Linux, whose scheduling class it is about")
def test_on_a_cpu_it_gets_only_the_time_that_engines_leave_and_one_port(spot):
    def classes(worker):
        return worker._thread.submit(os.sched_getscheduler, 0).result(), os.sched_getscheduler(0)

    session_class, calls = of_worker(spot, classes)
    assert session_class == os.SCHED_IDLE != calls, "`stop` is answered at once"
    listening = [c for c in psutil.Process(spot._pid).net_connections("tcp") if c.status == "LISTEN"]
    assert len(listening) == 1, "the one that Ray opens for every actor"


def test_it_sees_all_devices_of_its_node_and_reserves_none():
    ranks = [CaptureReady(i // 2, "here" if i < 4 else "there", str(i % 4 + 4)) for i in range(8)]
    place = Place.beside(ranks, {"a": range(0, 2), "b": range(2, 4), "c": range(4, 6)})
    assert place.devices == ("4", "5", "6", "7") and place.replicas == {"a": 0, "b": 2}
    wide = Place.beside(ranks, {"wide": range(2, 6)})
    assert wide.replicas == {"wide": 2}, "its part on this node"


# ---------------------------------------------------------------------- failures


def test_one_that_does_not_stop_is_killed_and_another_goes_on_from_what_was_published(spot, recorded):
    if spot.published is None:  # without the first test
        of_worker(spot, set_epochs, EPOCHS)
        assert [session(spot), session(spot)] and exported(spot)
    version, pid = of_worker(spot, served_version), spot._pid
    assert version > 0
    of_worker(spot, set_epochs, ENDLESS)
    ray.get(spot._actor.be.remote("deaf"))
    spot.train("short")
    begun = time.monotonic()
    assert spot.stop(1.0).outcome == "failed"
    assert time.monotonic() - begun < 4.0, "the trainer waits for its bound"
    assert spot.failures == ["session"] and "did not stop within 1 s" in spot.last_failure
    assert is_gone(pid, 30.0)
    assert not spot.ready(), "its buffer is empty"
    wait_for(spot.started)
    feed(spot, recorded, step=2)
    assert session(spot).steps > 0 and session(spot).verdict is not None
    assert of_worker(spot, served_version) == version


def test_one_that_is_killed_while_idle_holds_nobody_up(spot, recorded, tmp_path):
    """The final drafter is written all the same, by the one that takes its place."""
    states = captured(recorded)
    os.kill(spot._pid, signal.SIGKILL)
    begun = time.monotonic()
    spot.add(2, states)
    spot.ready()
    assert time.monotonic() - begun < 2.0
    spot.save(tmp_path / "drafter", FACTS)
    assert (tmp_path / "drafter" / "model.safetensors").is_file() and len(spot.failures) == 1


def test_one_that_hangs_is_replaced_however_often_hidden_states_come(spot, recorded, tmp_path, monkeypatch):
    """And holds no step up. A checkpoint waits for it as long as for the call in which it hangs."""
    monkeypatch.setattr(module, "CALL_S", 3.0)
    states = captured(recorded)
    for step in range(2, 8):  # steps that are shorter than the bound
        if step == 2:
            os.kill(spot._pid, signal.SIGSTOP)
        begun = time.monotonic()
        spot.add(step, states)
        assert time.monotonic() - begun < 2.0
        time.sleep(1.0)
    assert spot.failures == ["hidden states"]
    wait_for(spot.started)
    os.kill(spot._pid, signal.SIGSTOP)
    spot.add(8, states)
    begun = time.monotonic()
    spot.save(tmp_path / "drafter", FACTS)
    assert time.monotonic() - begun < SAVE_S / 4 and (tmp_path / "drafter" / "model.safetensors").is_file()
    assert spot.failures == ["hidden states", "hidden states"]


def test_a_disk_that_is_full_is_no_failure_of_the_spot_trainer(spot, tmp_path):
    (tmp_path / "drafter").write_text("a file, where the drafter's directory would be")
    pid = spot._pid
    with pytest.raises(CallFailed):
        spot.save(tmp_path / "drafter", FACTS)
    assert spot.failures == [] and spot._pid == pid


def test_too_little_memory_for_a_session_costs_the_session_and_nothing_else(spot):
    pid = spot._pid
    ray.get(spot._actor.be.remote("crowded"))
    for count in range(1, STRIKES + 1):
        failed = session(spot)
        assert (failed.outcome, failed.error) == ("failed", "no room") and spot.failures == ["session"] * count
    assert not spot.off, "the actor may leave more memory to the next session"
    ray.get(spot._actor.be.remote(""))
    assert session(spot).steps > 0 and spot._pid == pid, "it has its hidden states still"


def test_one_that_does_not_start_in_time_is_replaced(cluster, monkeypatch):
    monkeypatch.setattr(module, "START_S", 0.0)
    spot = SpotTrainerHandle(plan_of())
    spot.start([CaptureReady(0, cluster, "0")], {})
    assert not spot.started() and spot.failures == ["start"]
    spot.close()


def test_in_a_run_that_trains_nothing_there_is_nothing_to_publish():
    """The RL trainer asks in every step."""
    spot = SpotTrainerHandle(plan_of())
    assert spot.exported() is None and not spot.exporting
    assert not (spot.running or spot.replicas or spot.ready())


def test_a_call_on_its_node_runs_in_a_process_of_its_own_and_has_a_bound(cluster):
    spot = SpotTrainerHandle(plan_of())
    spot.place = Place(cluster, (), {})
    assert spot.on_its_node(is_gone, os.getpid(), 0.0) is False
    with pytest.raises(CallFailed, match="no answer within 1 s"):
        spot.on_its_node(is_gone, os.getpid(), 20.0, within_s=1.0)


def test_the_memory_of_a_killed_process_is_waited_for():
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    assert not is_gone(process.pid, 0.2)
    process.kill()
    assert is_gone(process.pid, MEMORY_S), "a zombie, which holds nothing any more"
    process.wait()
    assert is_gone(process.pid, 0.0)


def test_a_killed_process_is_not_gone_before_its_last_thread_is():
    """One that waits for a GPU's driver may live on, and the memory with it."""
    code = (
        "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print(flush=True)\nctypes.CDLL(None).pthread_exit(None)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    wait_for(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", 10.0)
    assert not is_gone(process.pid, 0.2)
    process.kill()
    assert is_gone(process.pid, MEMORY_S)
    process.wait()


def test_to_ask_for_the_load_leaves_no_record_in_rays_store(cluster):
    """It is asked many times a second, however long a run is."""
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    balancer = ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote({"server": None})
    servers = Servers(SimpleNamespace(get_replicas=list, global_load_balancer=balancer), None, 1, None)

    def calls():
        return sum(event["cat"].endswith(".get_status") for event in ray.timeline())

    before = calls()
    own = servers.balancer.get_status
    ray.get([own.remote() for _ in range(3)])
    for _ in range(3):
        servers.inflight()
    ray.get(own.remote())
    wait_for(lambda: calls() >= before + 4)
    time.sleep(2.0)  # Ray sends them every second
    assert calls() == before + 4
    ray.kill(balancer)


# ---------------------------------------------------------------------- the end of training


def test_three_failures_in_a_row_end_training_and_the_drafter_is_still_written(spot, recorded, tmp_path, caplog):
    """One from before a session that ended well does not count. Last, since it ends the spot trainer that all share."""
    for fault in ("broken", "", "broken", "dying", "broken"):
        wait_for(spot.started)
        feed(spot, recorded)
        assert not spot.off
        ray.get(spot._actor.be.remote(fault))
        spot.train("short")
        wait_for(lambda: spot.ended() is not None)
    assert len(spot.failures) == 1 + STRIKES and "3 times in a row" in spot.off
    assert caplog.text.count("the drafter is not trained in this run any more") == 1
    assert not spot.ready()
    spot.save(tmp_path / "drafter", FACTS)
    assert (tmp_path / "drafter" / "model.safetensors").is_file()
