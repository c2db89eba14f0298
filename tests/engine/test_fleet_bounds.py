"""Calls of the trainer to real actors: one that is late ends at its bound, and every server stages what is published.

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
    """A rollout server as far as publication goes; a picky one refuses one version."""

    def __init__(self, store, refused=None):
        self.refused = refused
        self.drafter = ray.get(store.first.remote(), timeout=60)

    def tlt_stage(self, drafter):
        if drafter.version == self.refused:
            raise OSError("no space left")
        self.drafter = drafter

    def staged(self):
        return self.drafter


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


def test_every_server_of_every_node_stages_what_is_published_and_all_go_back_where_one_cannot():
    first, second, third = (DrafterFile(version, "{}", bytes(8)) for version in range(3))
    store = ray.remote(servers.DrafterStore).options(num_cpus=0).remote(first)
    stages = ray.remote(Stages).options(num_cpus=0)
    actors = [stages.remote(store), stages.remote(store), stages.remote(store, refused=third.version)]
    replicas = [
        SimpleNamespace(_server_address=name, _server_handle=own[0], servers=own)
        for name, own in (("narrow", actors[:1]), ("wide", actors[1:]))
    ]
    fleet = servers.Servers(SimpleNamespace(get_replicas=lambda: replicas, global_load_balancer=None), None, 2, store)

    def staged():
        return ray.get([actor.staged.remote() for actor in actors], timeout=60)

    fleet.stage(ray.put(second))
    assert staged() == [second] * 3
    with pytest.raises(CallFailed):
        fleet.stage(ray.put(third))
    wait_for(lambda: staged() == [second] * 3, 60)
