"""What a server makes of its workers' answers about a drafter; in vLLM's place are answers made here."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from made_server import Engine, make_server

from verl_tlt.drafter.checkpoint import stage
from verl_tlt.messages.rollout import DrafterFile, DrafterStatus
from verl_tlt.server import server as module
from verl_tlt.server.server import TLTvLLMHttpServer

FINE = [None, None]
NEW = DrafterFile(version=4, config="{}", weights=b"", acceptance=(0.8, 0.7))


BEFORE = DrafterStatus(version=3, ok=True, acceptance=(0.5,))


def two_ranks(loads=FINE, switched=(None, None)):
    return Engine(tlt_load_drafter=loads, tlt_set_drafting=switched, control={})


async def reload(tmp_path, engine, drafter=NEW, disabled=False, before=BEFORE, settings=None):
    """(status after a reload, what the scheduler was told)"""
    server = make_server(engine, settings, _tlt_dir=tmp_path, _tlt_staged=drafter, _tlt_served=before)
    await server.tlt_disable_drafting(disabled, at_once=True)
    return await server.tlt_status(), engine.told()


async def test_a_drafter_that_every_rank_holds_is_served(tmp_path):
    engine = two_ranks()
    status, told = await reload(tmp_path, engine)
    assert (status.ok, status.version, status.error) == (True, 4, None)
    assert status.acceptance == (0.8, 0.7) and status.seconds > 0
    assert engine.asked.count(("tlt_load_drafter",)) == 1
    assert engine.asked[-2] == ("tlt_set_drafting", True)
    assert told == [{"drafting": True, "force_k": None, "acceptance": [0.8, 0.7]}]


@pytest.mark.parametrize("switched", [(None, None), RuntimeError("no such method")])
@pytest.mark.parametrize(
    ("loads", "why"),
    [
        ([None, "lacks fc.weight"], "lacks fc.weight"),
        (RuntimeError("engine died"), "RuntimeError: engine died"),
        (KeyError("no such key"), "no such key"),  # what nobody thought of
    ],
)
async def test_a_drafter_that_cannot_be_trusted_stops_the_drafting_and_nothing_else(tmp_path, loads, why, switched):
    engine = two_ranks(loads, switched)
    status, told = await reload(tmp_path, engine)
    assert not status.ok and engine.asked.count(("tlt_load_drafter",)) == 1
    assert (why if switched == (None, None) else "no such method") in status.error
    assert (status.version, status.acceptance) == (3, (0.5,)), "of what was served before"
    assert told == [{"drafting": False, "force_k": 0, "acceptance": None}]
    assert engine.asked[-1] == ("tlt_set_drafting", False)


@pytest.mark.parametrize("switched", [RuntimeError("no such method"), (None, "no such method")])
async def test_an_engine_that_cannot_run_the_pass_is_asked_for_no_drafts(tmp_path, switched):
    status, told = await reload(tmp_path, two_ranks(switched=switched))
    assert not status.ok and "no such method" in status.error
    assert told == [{"drafting": False, "force_k": 0, "acceptance": None}]


@pytest.mark.parametrize(("method", "trains"), [("mtp", True), ("mtp", False), ("eagle3", True)])
async def test_a_head_that_verl_trains_is_not_loaded_over_what_verl_sent(tmp_path, monkeypatch, method, trains):
    mtp = SimpleNamespace(enable=True, enable_train=trains)
    monkeypatch.setattr(TLTvLLMHttpServer, "config", SimpleNamespace(mtp=mtp), raising=False)
    engine = two_ranks()
    status, told = await reload(tmp_path, engine, settings={"drafter": {"method": method}})
    assert status.ok and status.version == 4 and told[-1]["drafting"] is True
    assert (("tlt_load_drafter",) in engine.asked) == (method == "eagle3" or not trains)


@pytest.mark.parametrize(("version", "expected"), [(3, None), (4, [])])
async def test_of_another_drafter_nothing_is_expected_and_of_the_same_one_what_was_learned(tmp_path, version, expected):
    unknown = replace(NEW, version=version, acceptance=())
    _, told = await reload(tmp_path, two_ranks(), unknown, before=replace(BEFORE, acceptance=()))
    assert told == [{"drafting": True, "force_k": None, "acceptance": expected}]


async def test_a_write_that_was_given_up_leaves_no_trace(tmp_path, monkeypatch):
    """Its thread goes on after the trainer has taken the drafter back, and ends first or last."""
    slow, began, goes_on = replace(NEW, weights=b"slow"), threading.Event(), threading.Event()

    def stage_slowly(config, weights, place):
        if weights == b"slow":
            began.set()
            assert goes_on.wait(20)
        stage(config, weights, place)

    monkeypatch.setattr(module, "stage", stage_slowly)
    server = make_server(_tlt_dir=tmp_path)
    given_up = asyncio.create_task(server.tlt_stage(slow))
    await asyncio.to_thread(began.wait, 20)
    await asyncio.wait_for(server.tlt_status(), 5)
    assert not given_up.done(), "other calls are answered while a drafter is written"
    given_up.cancel()
    back = asyncio.create_task(server.tlt_stage(replace(NEW, weights=b"before")))
    await asyncio.sleep(0.1)
    goes_on.set()
    await back
    file = tmp_path / "drafter" / "model.safetensors"
    assert file.read_bytes() == b"before"
    server._tlt_write(slow, 1)  # a thread that comes to it only now
    assert file.read_bytes() == b"before"
