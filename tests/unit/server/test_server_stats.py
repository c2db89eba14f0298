"""What a server tells of its engine, over a real channel; the engine behind it is not started."""

import logging

from verl_tlt.channel import ChannelClient, ChannelServer
from verl_tlt.config import TLTConfig
from verl_tlt.messages import to_plain
from verl_tlt.messages.rollout import DrafterStatus, EngineStats, Work
from verl_tlt.server.server import TLTvLLMHttpServer


async def told(tmp_path, **operations):
    """`tlt_stats` of a server whose engine answers these operations."""
    config = TLTConfig.from_dict({"speculation": {"source": "both", "costs_dir": None}})
    address = f"ipc://{tmp_path}/private/engine.sock"
    engine = ChannelServer(address, operations)
    server = object.__new__(TLTvLLMHttpServer)  # verl's own part would need Ray and a whole config
    server.tlt, server.replica_rank = config, 0
    server._tlt_key, server._tlt_served = None, DrafterStatus()
    server._tlt_channel = ChannelClient(address)
    try:
        return await server.tlt_stats()
    finally:
        server._tlt_channel.close()
        engine.close()


async def test_the_schedulers_sums_arrive_as_they_were_and_are_asked_for_anew(tmp_path):
    sums = EngineStats(num_steps=7, steps_by_draft_length={-1: 2, 3: 5}, work=(Work(4, 0.5, 9.0),), num_ngram_drafts=3)
    asked = []
    assert await told(tmp_path, stats=lambda reset: asked.append(reset) or to_plain(sums)) == sums
    assert asked == [True]


async def test_an_engine_that_does_not_answer_is_an_error_and_not_an_exception(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = await told(tmp_path)
    assert found.num_steps == 0 and "unknown operation 'stats'" in found.failure
    assert "no engine statistics this step" in caplog.text
