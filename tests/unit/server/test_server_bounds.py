"""What a server reports of its engine, and each bound of its waits; in vLLM's and Ray's place are answers made here."""

import asyncio
import logging
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import DrafterStatus, EngineStats, Work
from verl_tlt.server import scheduler_client
from verl_tlt.server import server as module
from verl_tlt.server.scheduler_client import SchedulerCallError, SchedulerClient
from verl_tlt.server.server import TLTvLLMHttpServer

BOUND_S, LATE_S = 0.2, 8.0


class Engine:
    """vLLM's client without requests: it raises `Exception` with what the engine said to the scheduler's caller."""

    def __init__(self, **operations):
        self.operations, self.engine_core = operations, self
        self.output_processor = SimpleNamespace(request_states={})

    async def call_utility_async(self, method, operation, arguments):
        assert method == "tlt_call"
        if operation not in self.operations:
            raise Exception(f"Call to tlt_call method failed: {operation!r}")
        answer = self.operations[operation](**arguments)
        return await answer if asyncio.iscoroutine(answer) else answer


@pytest.fixture
def server():
    """verl's own part would need Ray and a whole config."""
    server = object.__new__(TLTvLLMHttpServer)
    server.tlt = TLTConfig.from_dict({"speculation": {"source": "both", "costs_dir": None}})
    server.node_rank, server.replica_rank, server.engine = 0, 0, Engine()
    server._resume_event = asyncio.Event()
    server._tlt_key, server._tlt_served = None, DrafterStatus()
    return server


async def test_the_schedulers_sums_arrive_as_they_were_and_are_reset(server):
    sums = EngineStats(num_steps=7, steps_by_draft_length={-1: 2, 3: 5}, work=(Work(4, 0.5, 9.0),), num_ngram_drafts=3)
    asked = []
    server.engine = Engine(stats=lambda reset: asked.append(reset) or asdict(sums))
    assert await server.tlt_stats() == sums
    assert asked == [True]


async def test_an_engine_that_refuses_is_reported_and_raises_nothing(server, caplog):
    with caplog.at_level(logging.WARNING):
        found = await server.tlt_stats()
    assert found.num_steps == 0 and "The engine refused 'stats'" in found.failure
    assert "no engine statistics this step" in caplog.text


async def test_a_drafting_switch_that_is_not_taken_is_a_failed_reload(server):
    server._tlt_served, server._tlt_drafting_disabled = DrafterStatus(ok=True), False
    server.engine.collective_rpc = lambda **_: asyncio.sleep(0, [None])
    await server._tlt_set_drafting(SchedulerClient(server.engine), True)
    status = await server.tlt_status()
    assert not status.ok and "refused 'control'" in status.error, "counted in tlt/reload_failures"


async def test_an_engine_that_does_not_answer_is_waited_for_so_long(monkeypatch):
    monkeypatch.setattr(scheduler_client, "ANSWER_S", 0.05)
    engine = Engine(stats=lambda: asyncio.sleep(60))
    with pytest.raises(SchedulerCallError, match=r"did not answer 'stats' within 0\.05 s"):
        await SchedulerClient(engine).call("stats")


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


@pytest.mark.parametrize("speculates", [True, False])
def test_responses_end_at_stop_strings_where_tlt_speculates_and_stock_stays_stock(server, monkeypatch, speculates):
    from vllm.v1.engine.output_processor import OutputProcessor

    stock = OutputProcessor.process_outputs
    monkeypatch.setattr(OutputProcessor, "process_outputs", stock)
    for name in ("TLT_REPLICA", module.DIRECTORY, "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "")
    store = SimpleNamespace(latest=SimpleNamespace(remote=lambda: None))
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    monkeypatch.setattr(
        module,
        "ray",
        SimpleNamespace(get_actor=lambda name: store, get=lambda *_, **__: None, get_runtime_context=lambda: context),
    )
    monkeypatch.setattr(module, "engine_kwargs", lambda *_, **__: {})
    monkeypatch.setattr(module, "read_model_config", lambda _: {})
    monkeypatch.setattr(TLTvLLMHttpServer, "tlt_stage", lambda *_: None)
    server.tlt = TLTConfig.from_dict({"speculation": {"enable": speculates}})
    server.config, server._tlt_dir = SimpleNamespace(checkpoint_engine=None), Path("nowhere")
    server.model_config = SimpleNamespace(local_path="nowhere")
    server._preprocess_engine_kwargs({})
    assert (OutputProcessor.process_outputs is stock) != speculates
