"""Each bound of the fleet's calls, hit once on real actors: nobody answers, and what happens is said and bounded."""

import time
from types import SimpleNamespace

import pytest
from recorded import ray_cluster, worker_arguments

from verl_tlt.messages.training import DrafterProvenance
from verl_tlt.trainer.waits import ASK_S, SILENT_S, Call, CallFailed, Waits, ask

pytestmark = pytest.mark.engine

ray = pytest.importorskip("ray")

BOUND_S, LATE_S = 1.0, 20.0


class Deaf:
    """An actor that takes every call and answers none."""

    async def nothing(self):
        """Never."""
        import asyncio

        await asyncio.sleep(3600)

    async def late(self, seconds):
        """After so many."""
        import asyncio

        await asyncio.sleep(seconds)
        return "late"

    async def packs(self, seconds):
        """What holds Python's lock for so long, as bytes do that are made or pickled: no thread of it runs."""
        import ctypes

        ctypes.PyDLL(None).sleep(int(seconds))
        return "packed"

    def __getattr__(self, name):
        return self.nothing


class Slow:
    """An actor that notes what it does."""

    def __init__(self):
        self.notes = []

    async def said(self):
        """What it has done."""
        return self.notes

    async def act(self, name, seconds):
        """Do something after so many seconds."""
        import asyncio

        self.notes.append(f"began {name}")
        try:
            await asyncio.sleep(seconds)
            self.notes.append(f"did {name}")
        finally:
            self.notes.append(f"ended {name}")


def wait_for(condition, seconds=60):
    """Until something has become so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


class Forever:
    """A handle whose every method is the deaf actor's."""

    def __init__(self, actor):
        self.actor = actor
        self.remote = lambda *args: actor.nothing.remote()
        self.options = lambda **options: self

    def __getattr__(self, name):
        return self


@pytest.fixture(scope="module")
def deaf():
    """A handle that can be called anything."""
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        actor = ray.remote(Deaf).options(num_cpus=0).remote()
        ray.get(actor.__ray_ready__.remote(), timeout=300)
        yield Forever(actor)
        ray.kill(actor)


@pytest.fixture
def fleet(deaf, monkeypatch):
    """One replica, of which nobody answers; every bound is short."""
    from verl.single_controller.ray import RayResourcePool

    from verl_tlt.trainer import servers, spot_workers
    from verl_tlt.trainer.run_setup import SpotPlan

    for name in ("CALL_S", "SLEEP_S", "CALIBRATION_S"):
        monkeypatch.setattr(servers, name, BOUND_S)
    monkeypatch.setattr(spot_workers, "CALL_S", BOUND_S)
    replica = SimpleNamespace(_server_address="a", _server_handle=deaf, servers=[deaf])
    manager = SimpleNamespace(get_replicas=lambda: [replica], global_load_balancer=deaf)
    actor = SimpleNamespace(world_size=1, tlt_setup=deaf.remote, tlt_take=deaf.remote)
    pool = RayResourcePool([1], max_colocate_count=2)
    fleet = spot_workers.Fleet(manager, actor, deaf, pool, SpotPlan(**worker_arguments()))
    fleet.replaced = []
    fleet.waits = Waits(fleet.replaced.extend)
    return fleet


@pytest.mark.parametrize(
    "call",
    [
        lambda fleet: fleet.inflight(),
        lambda fleet: fleet.leave("a"),
        lambda fleet: fleet.rejoin(["a"]),
        lambda fleet: fleet.try_sleep("a", False),
        lambda fleet: fleet.wake_up("a"),
        lambda fleet: fleet.disable_drafting([], at_once=False),
        lambda fleet: fleet.stage(fleet.spot.drafter),
        lambda fleet: fleet.drafter_statuses(),
        lambda fleet: fleet.engine_stats(),
        lambda fleet: fleet.calibrate(),
        lambda fleet: fleet.start_spot((2, 4), None, counts_tokens=False),
        lambda fleet: fleet.take(True, 100),
        lambda fleet: fleet.close(),
    ],
    ids=lambda call: call.__code__.co_names[0],
)
def test_a_call_that_nobody_answers_fails_after_its_bound(fleet, call):
    begin = time.monotonic()
    with pytest.raises(CallFailed, match="no answer within 1 s") as failure:
        call(fleet)
    assert 0.9 * BOUND_S <= time.monotonic() - begin < BOUND_S + LATE_S
    assert failure.value.silent and not failure.value.died


def test_a_call_to_a_server_that_is_given_up_ends_where_it_waits():
    actor = ray.remote(Slow).options(num_cpus=0).remote()
    begun = actor.act.remote("begun", 600.0)
    wait_for(lambda: "began begun" in ray.get(actor.said.remote()))
    with pytest.raises(CallFailed, match="no answer"):
        ask([begun], 0.5)
    wait_for(lambda: ray.get(actor.said.remote()) == ["began begun", "ended begun"])
    ray.kill(actor)


def test_spot_workers_that_answer_nobody_are_replaced(fleet, deaf):
    fleet.spot_workers["a"].handles = {"a": deaf, "a/1": deaf}
    begin = time.monotonic()
    fleet.revert("served")
    assert time.monotonic() - begin < BOUND_S + LATE_S, "they share one bound"
    assert fleet.replaced == ["a"]


@pytest.mark.parametrize("call", ["keep_as_served", "save"])
def test_what_a_step_waits_for_is_bounded_by_what_it_can_bear(fleet, deaf, tmp_path, monkeypatch, call):
    from verl_tlt.trainer import spot_workers as module

    monkeypatch.setattr(module, "CALL_S", 600.0)
    fleet.spot_workers["a"].handles = {"a": deaf}
    begin = time.monotonic()
    if call == "save":
        with pytest.raises(CallFailed, match="no spot worker"):
            fleet.save(tmp_path / "drafter", DrafterProvenance("policy", "data", "hass", 1.0))
    else:
        fleet.keep_as_served()
    assert 0.9 * SILENT_S <= time.monotonic() - begin < SILENT_S + LATE_S
    assert fleet.replaced == ["a"] and [f.replica for f in fleet.waits.failures()] == ["a"]


def test_one_that_gives_no_sign_of_life_is_not_waited_for_any_longer(deaf):
    begin = time.monotonic()
    with pytest.raises(CallFailed, match="no sign of life") as failure:
        Call([deaf.remote()], list, [deaf]).result(600.0)
    assert 0.9 * SILENT_S <= time.monotonic() - begin < SILENT_S + LATE_S and failure.value.silent


def test_long_work_of_one_that_lives_is_waited_for(deaf):
    lives = deaf.actor
    with pytest.raises(CallFailed, match=f"no answer within {2 * SILENT_S:.0f} s"):
        Call([lives.nothing.remote()], list, [lives]).result(2 * SILENT_S)
    assert Call([lives.late.remote(3 * ASK_S)], list, [lives]).result(600.0) == ["late"]


def test_one_that_packs_gigabytes_for_the_engines_is_not_taken_for_silent(fleet, deaf, monkeypatch):
    from verl_tlt.trainer import spot_workers as module

    monkeypatch.setattr(module, "CALL_S", 600.0)
    packs = SimpleNamespace(remote=lambda *_: deaf.actor.packs.remote(2 * SILENT_S))
    marks = SimpleNamespace(remote=lambda *_: ray.put(None))
    fleet.spot_workers["a"].handles = {
        "a": SimpleNamespace(export=packs, mark_exported=marks, __ray_ready__=deaf.actor.__ray_ready__)
    }
    assert fleet.export(1, "bfloat16", []) == "packed" and fleet.replaced == []
    monkeypatch.setattr(module, "CALL_S", BOUND_S)
    with pytest.raises(CallFailed, match="no spot worker exported"):
        fleet.export(2, "bfloat16", [])
    assert fleet.replaced == ["a"]
    ray.get(deaf.actor.__ray_ready__.remote(), timeout=60)  # it answers again


def test_one_that_is_still_starting_is_left_alone_for_its_bound(fleet, deaf, monkeypatch):
    from verl_tlt.trainer import spot_workers as module

    fleet.spot_workers["a"].begin({"a": deaf})
    fleet.revert("served")
    begin = time.monotonic()
    fleet.keep_as_served()
    assert time.monotonic() - begin < SILENT_S, "the weight sync does not wait for it at all"
    assert fleet.replaced == []
    assert fleet.hand_over(1, []) == {}
    monkeypatch.setattr(module, "START_S", 0.0)
    fleet.revert("served")
    assert fleet.replaced == ["a"]


@pytest.mark.parametrize("lives", [True, False], ids=["one of them", "its process"])
def test_workers_whose_merge_hangs_are_replaced(fleet, monkeypatch, deaf, lives):
    from verl_tlt.trainer import spot_workers as module

    monkeypatch.setattr(module, "start_merge", lambda workers: ([deaf.remote()], []))
    fleet.spot_workers["a"].handles = {"a": deaf.actor if lives else deaf}
    with pytest.raises(CallFailed, match="no answer"):
        fleet.merge(["a"])
    assert fleet.replaced == ["a"]


def test_one_that_averages_nothing_is_replaced_alone(fleet, monkeypatch, deaf):
    """Each averages another slice, and all adopt every slice; the others keep candidate, optimizer and buffers."""
    from verl_tlt.trainer import spot_workers as module

    averages = [ray.put("the first slice's"), deaf.remote()]
    monkeypatch.setattr(module, "start_merge", lambda workers: (averages, averages))
    fleet.spot_workers["a"].handles = {"a": SimpleNamespace(__ray_ready__=deaf.actor.__ray_ready__, adopt=deaf)}
    fleet.spot_workers["b"] = module.ReplicaWorkers("b", [1], {"b": deaf})
    with pytest.raises(CallFailed, match="no answer"):
        fleet.merge(["a", "b"])
    assert fleet.replaced == ["b"]


def test_one_that_fails_fails_all_once_the_others_have_answered():
    actors = [ray.remote(Slow).options(num_cpus=0).remote() for _ in range(3)]
    ray.get([actor.said.remote() for actor in actors])
    begin = time.monotonic()
    calls = [actors[0].act.remote("it", 1.0), actors[1].act.remote("it", "no number"), actors[2].said.remote()]
    with pytest.raises(CallFailed, match="TypeError") as failure:
        Call(calls, list, actors).result(60.0)
    assert time.monotonic() - begin >= 0.9 and not (failure.value.died or failure.value.silent)
    assert Call([actor.act.remote("it", 0.0) for actor in actors], len, actors).result(60.0) == 3
    calls = [actor.act.remote("it", 60.0) for actor in actors]
    for actor in actors:
        ray.kill(actor)
    with pytest.raises(CallFailed) as failure:
        Call(calls, list, actors).result(60.0)
    assert failure.value.died and time.monotonic() - begin < LATE_S
