"""Each bound of a server's waits, hit once; no engine is behind it."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from verl_tlt.config import TLTConfig
from verl_tlt.server import server as module
from verl_tlt.server.server import TLTvLLMHttpServer

BOUND_S, LATE_S = 0.2, 8.0


@pytest.fixture
def server():
    """What is asked of one that leaves; verl's own part would need Ray and a whole config."""
    server = object.__new__(TLTvLLMHttpServer)
    server.node_rank, server.replica_rank, server.tlt = 0, 0, TLTConfig.from_dict({})
    server._resume_event = asyncio.Event()
    server.engine = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
    return server


async def test_a_request_whose_admission_hangs_keeps_its_server(server, monkeypatch):
    monkeypatch.setattr(module, "ADMISSION_TIMEOUT_S", BOUND_S)
    server._admitting = 1
    begin = time.monotonic()
    assert not await server.tlt_try_sleep()
    assert BOUND_S <= time.monotonic() - begin < BOUND_S + LATE_S
    assert server._resume_event.is_set() and not server._rejecting, "the gate is open again"


def test_a_first_drafter_that_does_not_come_ends_the_start(server, monkeypatch):
    ray = pytest.importorskip("ray")
    asked = {}

    def get(reference, timeout):
        asked["timeout"] = timeout
        raise ray.exceptions.GetTimeoutError("no answer")

    monkeypatch.setattr(module, "STORE_S", BOUND_S)
    store = SimpleNamespace(latest=SimpleNamespace(remote=lambda: None))
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    alike = SimpleNamespace(get_actor=lambda name: store, get=get, get_runtime_context=lambda: context)
    monkeypatch.setattr(module, "ray", alike)
    server.config = SimpleNamespace(checkpoint_engine=None)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        server._preprocess_engine_kwargs({})
    assert asked == {"timeout": BOUND_S}
