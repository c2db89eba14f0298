"""What a server reports of its engine, and how it asks the scheduler; in vLLM's place are answers made here."""

import asyncio
import logging
from dataclasses import asdict

import pytest

from verl_tlt.config import TLTConfig
from verl_tlt.messages.rollout import DrafterStatus, EngineStats, Work
from verl_tlt.server import scheduler_client
from verl_tlt.server.scheduler_client import SchedulerCallError, SchedulerClient
from verl_tlt.server.server import TLTvLLMHttpServer


class Engine:
    """vLLM's client, as far as the scheduler is asked: it raises `Exception` with what the engine said."""

    def __init__(self, **operations):
        self.operations, self.engine_core = operations, self

    async def call_utility_async(self, method, operation, arguments):
        assert method == "tlt_call"
        if operation not in self.operations:
            raise Exception(f"Call to tlt_call method failed: {operation!r}")
        answer = self.operations[operation](**arguments)
        return await answer if asyncio.iscoroutine(answer) else answer


async def stats_of(engine):
    config = TLTConfig.from_dict({"speculation": {"source": "both", "costs_dir": None}})
    server = object.__new__(TLTvLLMHttpServer)  # verl's own part would need Ray and a whole config
    server.tlt, server.replica_rank, server.node_rank, server.engine = config, 0, 0, engine
    server._tlt_key, server._tlt_served = None, DrafterStatus()
    return await server.tlt_stats()


async def test_the_schedulers_sums_arrive_as_they_were_and_are_reset():
    sums = EngineStats(num_steps=7, steps_by_draft_length={-1: 2, 3: 5}, work=(Work(4, 0.5, 9.0),), num_ngram_drafts=3)
    asked = []
    assert await stats_of(Engine(stats=lambda reset: asked.append(reset) or asdict(sums))) == sums
    assert asked == [True]


async def test_an_engine_that_refuses_is_reported_and_raises_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        found = await stats_of(Engine())
    assert found.num_steps == 0 and "The engine refused 'stats'" in found.failure
    assert "no engine statistics this step" in caplog.text


async def test_an_engine_that_does_not_answer_is_waited_for_so_long(monkeypatch):
    monkeypatch.setattr(scheduler_client, "ANSWER_S", 0.05)
    engine = Engine(stats=lambda: asyncio.sleep(60))
    with pytest.raises(SchedulerCallError, match=r"did not answer 'stats' within 0\.05 s"):
        await SchedulerClient(engine).call("stats")
