"""The bound of calls to servers and actor, on real actors: nobody answers, and the caller goes on.

That each call has one, tests/unit/test_waits.py finds in the source. And what is staged on servers that do answer.
"""

import time
from types import SimpleNamespace

import pytest
from recorded import ray_cluster

from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.trainer import servers, spot
from verl_tlt.trainer.waits import CallFailed, ask

pytestmark = pytest.mark.engine

ray = pytest.importorskip("ray")

BOUND_S, LATE_S = 1.0, 20.0


class Deaf:
    """An actor that takes every call and answers none."""

    async def nothing(self):
        """Never."""
        import asyncio

        await asyncio.sleep(3600)

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


class Stages:
    """A rollout server as far as publication goes; a picky one refuses one version."""

    def __init__(self, store, refused=None):
        self.refused = refused
        self.drafter = ray.get(store.latest.remote(), timeout=60)

    def tlt_stage(self, drafter):
        if drafter.version == self.refused:
            raise OSError("no space left")
        self.drafter = drafter

    def staged(self):
        return self.drafter


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
    """(servers, hidden states) of one replica, of which nobody answers; the bound is short."""
    for module in (servers, spot):
        monkeypatch.setattr(module, "CALL_S", BOUND_S)
    replica = SimpleNamespace(_server_address="a", _server_handle=deaf, servers=[deaf])
    manager = SimpleNamespace(get_replicas=lambda: [replica], global_load_balancer=deaf)
    actor = SimpleNamespace(tlt_take=deaf.remote)
    return servers.Servers(manager, None, 1, deaf), spot.HiddenStates(actor)


@pytest.mark.parametrize(
    "call",
    [
        lambda servers, _: servers.inflight(),
        lambda servers, _: servers.stage(DrafterFile(1, "{}", b"")),
        lambda servers, _: servers.drafter_statuses(),
        lambda _, hidden_states: hidden_states.take(),
    ],
    ids=lambda call: call.__code__.co_names[0],
)
def test_a_call_that_nobody_answers_fails_after_its_bound(fleet, call):
    begin = time.monotonic()
    with pytest.raises(CallFailed, match="no answer within 1 s") as failure:
        call(*fleet)
    assert 0.9 * BOUND_S <= time.monotonic() - begin < BOUND_S + LATE_S
    assert failure.value.late and not failure.value.died


def test_a_call_to_a_server_that_is_given_up_ends_where_it_waits():
    actor = ray.remote(Slow).options(num_cpus=0).remote()
    begun = actor.act.remote("begun", 600.0)
    wait_for(lambda: "began begun" in ray.get(actor.said.remote()))
    with pytest.raises(CallFailed, match="no answer"):
        ask([begun], 0.5)
    wait_for(lambda: ray.get(actor.said.remote()) == ["began begun", "ended begun"])
    ray.kill(actor)


def test_every_server_of_every_node_stages_what_is_published_and_all_go_back_where_one_cannot(deaf):
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
    assert ray.get(stages.remote(store).staged.remote(), timeout=60) == second, "a server that starts later has it"
    with pytest.raises(CallFailed):
        fleet.stage(ray.put(third))
    wait_for(lambda: staged() == [second] * 3)
