"""What a server reports of its engine, and each bound of its waits; in vLLM's and Ray's place are answers made here."""

import asyncio
import logging
import time
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from made_server import Engine, make_server
from step_costs import step_costs
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from verl_tlt.config import TLTConfig
from verl_tlt.errors import TLTError
from verl_tlt.messages.rollout import DrafterFile, EngineStats
from verl_tlt.server import engine_calls
from verl_tlt.server import server as module
from verl_tlt.server.engine_calls import EngineGone
from verl_tlt.speculation.types import OFF

BOUND_S, LATE_S = 0.2, 8.0


@pytest.fixture
def server():
    return make_server(settings={"speculation": {"source": "ngram"}})


async def test_the_schedulers_sums_arrive_as_they_were_and_are_reset(server):
    sums = EngineStats(num_steps=7, steps_by_draft_length={-1: 2, 3: 5}, tokens_by_batch={4: 9})
    server.engine = Engine(stats=asdict(sums))
    assert await server.tlt_stats() == sums
    assert server.engine.asked == [("stats", {"reset": True})]


async def test_an_engine_that_refuses_is_reported_and_raises_nothing(server, caplog):
    with caplog.at_level(logging.WARNING):
        found = await server.tlt_stats()
    assert found.num_steps == 0 and "The engine refused 'stats'" in found.failure
    assert "no engine statistics this step" in caplog.text


async def test_an_engine_that_does_not_start_with_its_drafter_says_how_it_starts_without(monkeypatch):
    async def launch(_):
        raise RuntimeError("no such drafter")

    monkeypatch.setattr(vLLMHttpServer, "launch_server", launch)
    with pytest.raises(TLTError, match=r"replica 0 does not start with its drafter .*no such drafter.*enable=false"):
        await make_server().launch_server()
    with pytest.raises(RuntimeError, match="no such drafter"):
        await make_server(settings={"speculation": {"enable": False}}).launch_server()


@pytest.mark.parametrize("asked", [{"thinking_token_budget": 9}, {"prompt_logprobs": 0}])
async def test_a_request_that_a_speculating_engine_answers_wrongly_is_refused(monkeypatch, asked):
    async def generate(_, prompt_ids, sampling_params, request_id):
        return request_id

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    stock = make_server(settings={"speculation": {"enable": False}})
    assert await stock.generate([1], asked, request_id="a") == "a"
    assert await make_server().generate([1], {"temperature": 1.0}, "a") == "a"
    with pytest.raises(TLTError, match=rf"{next(iter(asked))}.*tlt\.speculation\.enable=false"):
        await make_server().generate([1], asked, "a")


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("method", ["tlt_load_drafter", "tlt_set_drafting", "control"])
async def test_a_weight_sync_ends_in_one_sentence_where_the_engine_died_or_hangs(server, monkeypatch, dies, method):
    monkeypatch.setattr(engine_calls, "ANSWER_S", BOUND_S)

    async def fail(*_):
        if not dies:
            await asyncio.sleep(60)
        server.engine.errored = True
        raise Exception("EngineCore encountered an issue.")

    fine = {"tlt_load_drafter": [None], "tlt_set_drafting": [None], "control": {}}
    server.engine, server.tlt = Engine(**{**fine, method: fail}), TLTConfig.from_dict({})
    server._tlt_staged = DrafterFile(0, "{}", b"")
    if method == "control" and not dies:  # what an engine that answers does not do with the switch
        monkeypatch.setattr(engine_calls, "SCHEDULER_S", BOUND_S)
        await server.tlt_disable_drafting(False, at_once=True)
        assert "did not answer 'control'" in (await server.tlt_status()).error
        return
    with pytest.raises(EngineGone, match=r"^The engine (died|did not) [^\n]+\.$"):
        await server.tlt_disable_drafting(False, at_once=True)
    assert server.engine.asked[-1][0] == method, "an engine that is gone is asked nothing more"


@pytest.mark.parametrize(("rank", "loaded", "adapter"), [(0, [], None), (8, [], None), (8, [123], 123)])
async def test_a_replica_measures_and_the_others_use_what_it_measured(server, monkeypatch, rank, loaded, adapter):
    server.tlt, server.engine = TLTConfig.from_dict({}), Engine(control={}, stats={})
    server.engine.vllm_config = SimpleNamespace(
        additional_config={"tlt": {"arms": [0, 2]}}, scheduler_config=SimpleNamespace(max_num_seqs=8),
        cache_config=SimpleNamespace(num_gpu_blocks=1000, block_size=16),
        model_config=SimpleNamespace(get_vocab_size=lambda: 3, max_model_len=1000),
    )  # fmt: skip
    server.config = RolloutConfig(name="vllm", temperature=0.7, top_p=0.9, calculate_log_probs=True)
    costs, asked = step_costs({k: [(1, 0.01), (8, 0.02)] for k in (OFF, 0, 2)}), []

    server.model_config = SimpleNamespace(lora_rank=rank, lora={})
    server.engine.list_loras = AsyncMock(return_value=set(loaded))

    async def calibrate(engine, lengths, loads, vocab_size, sampling, lora):
        assert (lora and lora.lora_int_id) == adapter, "as in the rollout"
        assert vocab_size == 3, "tokens that only the tokenizer knows would end the engine"
        assert sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "logprobs": 0}, "as in the rollout"
        asked.append((lengths, {load.batch for load in loads}))
        return costs

    monkeypatch.setattr(module, "draft_once", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(module, "calibrate", calibrate)
    assert await server.tlt_calibrate() == costs and asked == [((0, 2), {1, 2, 4, 8})]
    other = step_costs({k: [(1, 0.03)] for k in (OFF, 0, 2)})
    assert await server.tlt_calibrate(other) == other and len(asked) == 1
    assert server.engine.told() == [{"points": costs.to_list()}, {"points": other.to_list()}]


async def test_one_that_fails_to_sleep_keeps_its_gate_closed_until_the_weight_sync(server, monkeypatch):
    """Whoever asked it takes it for gone: it may sleep already."""

    async def fails():
        raise RuntimeError("the engine did not sleep")

    server.sleep = fails
    with pytest.raises(RuntimeError, match="did not sleep"):
        await server.tlt_try_sleep()
    assert server._rejecting and not server._resume_event.is_set()
    monkeypatch.setattr(module.vLLMHttpServer, "wake_up", lambda *_, **__: asyncio.sleep(0))
    await server.wake_up(tags=["kv_cache"])
    assert server._resume_event.is_set() and not server._rejecting


async def test_one_that_verl_takes_over_while_it_is_asked_does_not_sleep(server, monkeypatch):
    stock = []

    async def abort(*_, **named):
        stock.append(named)
        server._submission_paused, server._rejecting, server._admitting = True, False, 0
        return {}

    monkeypatch.setattr(module.vLLMHttpServer, "abort_all_requests", abort)
    server._admitting, server._tlt_left = 1, False
    asked = asyncio.create_task(server.tlt_try_sleep(recall=True))
    await asyncio.sleep(0.01)
    await server.abort_all_requests()
    assert not await asked and len(stock) == 1, "the request on its way is verl's to abort"
    assert server._submission_paused and not server._rejecting, "and the gate is verl's to open"


async def test_a_request_whose_admission_hangs_keeps_its_server(server, monkeypatch):
    monkeypatch.setattr(module, "ADMISSION_TIMEOUT_S", BOUND_S)
    server._admitting = 1
    begin = time.monotonic()
    assert not await server.tlt_try_sleep()
    assert BOUND_S <= time.monotonic() - begin < BOUND_S + LATE_S
    assert server._resume_event.is_set() and not server._rejecting, "the gate is open again"


def test_where_tlt_does_not_speculate_an_engine_gets_stocks_arguments():
    off = {"speculation": {"enable": False}}
    server, arguments = make_server(settings=off, config=SimpleNamespace(checkpoint_engine=None)), {"seed": 1}
    server._preprocess_engine_kwargs(arguments)
    assert arguments == {"seed": 1}
