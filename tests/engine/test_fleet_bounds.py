"""Calls of the trainer to real actors: one that is late ends at its bound, and servers stage what is published.

That each call has a bound, tests/unit/test_waits.py finds in the source.
"""

import asyncio
import time
from types import SimpleNamespace

import pytest
from recorded import ray_cluster, wait_for

from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.trainer import servers
from verl_tlt.trainer.waits import CallFailed, ask

pytestmark = pytest.mark.engine

ray = pytest.importorskip("ray")

BOUND_S, LATE_S = 1.0, 20.0


class Slow:
    """An actor that notes what it does."""

    def __init__(self):
        self.notes = []

    async def said(self):
        """What it has done."""
        return self.notes

    async def act(self):
        """Do something that takes longer than anybody waits."""
        self.notes.append("began")
        try:
            await asyncio.sleep(600)
        finally:
            self.notes.append("ended")


class Stages:
    """A rollout server as far as publication goes; one may refuse versions."""

    def __init__(self, store):
        self.refused, self.takes_s = (), 0.0
        (first,) = ray.get(store.first.remote(), timeout=60)
        self.drafter = ray.get(first, timeout=60)

    def tlt_stage(self, drafter):
        if drafter.version in self.refused:
            raise OSError("no space left")
        time.sleep(self.takes_s)
        self.drafter = drafter

    def staged(self):
        return self.drafter

    def refuse(self, *versions):
        self.refused = versions

    def slow(self, takes_s):
        self.takes_s = takes_s


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        yield


def test_a_call_that_is_late_fails_after_its_bound_and_ends_where_it_waits():
    actor = ray.remote(Slow).options(num_cpus=0).remote()
    begun = actor.act.remote()
    wait_for(lambda: "began" in ray.get(actor.said.remote()), 60)
    begin = time.monotonic()
    with pytest.raises(CallFailed, match="no answer within 1 s") as failure:
        ask([begun], BOUND_S)
    assert 0.9 * BOUND_S <= time.monotonic() - begin < BOUND_S + LATE_S
    assert failure.value.late and not failure.value.died
    wait_for(lambda: ray.get(actor.said.remote()) == ["began", "ended"], 60)
    ray.kill(actor)


def test_every_server_stages_what_is_published_and_a_replica_that_cannot_keeps_one_drafter_on_all_nodes(
    monkeypatch,
):
    first, second, third, fourth, fifth = (DrafterFile(version, "{}", bytes(8)) for version in range(5))
    drafter = ray.put(first)
    store = ray.remote(servers.DrafterStore).options(num_cpus=0).remote([drafter])
    actors = [ray.remote(Stages).options(num_cpus=0).remote(store) for _ in range(3)]
    replicas = [
        SimpleNamespace(_server_address=name, _server_handle=own[0], servers=own)
        for name, own in (("narrow", actors[:1]), ("wide", actors[1:]))
    ]
    fleet = servers.Servers(SimpleNamespace(get_replicas=lambda: replicas, global_load_balancer=None), None, 2, drafter)

    def staged():
        return ray.get([actor.staged.remote() for actor in actors], timeout=60)

    assert staged() == [first] * 3
    # A drafter takes longer to arrive, also the one before it, than other calls do.
    monkeypatch.setattr(servers, "CALL_S", BOUND_S)
    monkeypatch.setattr(servers, "SLEEP_S", BOUND_S)
    ray.get([actor.slow.remote(1.5 * BOUND_S) for actor in actors], timeout=60)
    assert fleet.stage(ray.put(second)) == 0 and staged() == [second] * 3
    actors[2].refuse.remote(third.version)
    assert fleet.stage(ray.put(third)) == 1 and staged() == [third, second, second]
    ray.get([actor.slow.remote(0.0) for actor in actors], timeout=60)
    actors[2].refuse.remote()
    assert fleet.stage(ray.put(fourth)) == 0 and staged() == [fourth] * 3
    for actor in (actors[0], actors[2]):
        actor.refuse.remote(fifth.version)
    with pytest.raises(CallFailed):
        fleet.stage(ray.put(fifth))
    assert staged() == [fourth] * 3
