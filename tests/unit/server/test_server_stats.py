"""What a server tells of its engine, over a real channel; the engine behind it is not started."""

import logging

from verl_tlt.channel import ChannelClient, ChannelServer
from verl_tlt.config import TLTConfig
from verl_tlt.server.server import DrafterState, TLTvLLMHttpServer
from verl_tlt.speculation.profitability import Profitability


async def told(tmp_path, **operations):
    """`tlt_stats` of a server with n-grams, whose engine answers these operations."""
    config = TLTConfig.from_dict({"speculation": {"source": "both", "costs_dir": None}})
    address = f"ipc://{tmp_path}/private/engine.sock"
    engine = ChannelServer(address, operations)
    server = object.__new__(TLTvLLMHttpServer)  # verl's own part would need Ray and a whole config
    server.tlt, server.replica_rank = config, 0
    server._tlt_key, server._tlt_served = None, DrafterState()
    server._tlt_profitability = Profitability(config.speculation.policy, config.speculation.source)
    server._tlt_channel = ChannelClient(address)
    try:
        return await server.tlt_stats()
    finally:
        server._tlt_channel.close()
        engine.close()


async def test_engine_and_n_gram_statistics_come_together(tmp_path):
    found = await told(tmp_path, stats=lambda reset: {"steps": 7, "reset": reset}, ngram=lambda: {"ngram_drafts": 3})
    assert found == {"steps": 7, "reset": True, "ngram_drafts": 3}


async def test_n_gram_statistics_that_fail_take_nothing_else_with_them(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = await told(tmp_path, stats=lambda reset: {"steps": 7})
    assert found["steps"] == 7 and "unknown operation 'ngram'" in found["error"]
    assert "no n-gram statistics this step" in caplog.text


async def test_an_engine_that_does_not_answer_is_an_error_and_not_an_exception(tmp_path):
    assert "unknown operation 'stats'" in (await told(tmp_path, ngram=lambda: {}))["error"]
