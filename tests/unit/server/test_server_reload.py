"""What a server makes of its workers' answers about a drafter; in vLLM's place are answers made here."""

import os
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from made_server import Engine, make_server
from safetensors.torch import save
from vllm.config import VllmConfig

from verl_tlt.drafter.checkpoint import STAGE_DIR, stage
from verl_tlt.messages.rollout import DrafterFile, DrafterStatus, LoadReply
from verl_tlt.server.server import TLTvLLMHttpServer
from verl_tlt.vllm_worker.extension import LiveDrafter, TLTWorkerExtension

FINE = [asdict(LoadReply(ok=True))] * 2
NEW = DrafterFile(version=4, config="{}", weights=b"", acceptance=(0.8, 0.7))


BEFORE = DrafterStatus(version=3, ok=True, acceptance=(0.5,), reloads=7)


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
    assert status.drafting and status.acceptance == (0.8, 0.7) and status.reloads == 8 and status.seconds > 0
    assert engine.asked[-2] == ("tlt_set_drafting", True)
    assert told == [{"drafting": True, "force_k": None, "acceptance": [0.8, 0.7]}]


@pytest.mark.parametrize("switched", [(None, None), RuntimeError("no such method")])
@pytest.mark.parametrize(
    ("loads", "why"),
    [
        ([FINE[0], asdict(LoadReply(ok=False, error="lacks fc.weight"))], "lacks fc.weight"),
        (RuntimeError("engine died"), "RuntimeError: engine died"),
        (KeyError("no such key"), "no such key"),  # what nobody thought of
    ],
)
async def test_a_drafter_that_cannot_be_trusted_stops_the_drafting_and_nothing_else(tmp_path, loads, why, switched):
    engine = two_ranks(loads, switched)
    status, told = await reload(tmp_path, engine)
    assert not status.ok and status.reloads == 8
    assert (why if switched == (None, None) else "no such method") in status.error
    assert (status.version, status.acceptance) == (3, (0.5,)), "of what was served before"
    assert told == [{"drafting": False, "force_k": 0, "acceptance": [0.5]}]
    assert engine.asked[-1] == ("tlt_set_drafting", False) and not status.drafting


async def test_an_engine_that_cannot_run_the_pass_is_asked_for_no_drafts(tmp_path):
    status, told = await reload(tmp_path, two_ranks(switched=RuntimeError("no such method")))
    assert not status.ok and not status.drafting and "no such method" in status.error and told == []


@pytest.mark.parametrize(("method", "trains"), [("mtp", True), ("mtp", False), ("eagle3", True)])
async def test_a_head_that_verl_trains_is_not_loaded_over_what_verl_sent(tmp_path, monkeypatch, method, trains):
    mtp = SimpleNamespace(enable=True, enable_train=trains)
    monkeypatch.setattr(TLTvLLMHttpServer, "config", SimpleNamespace(mtp=mtp), raising=False)
    engine = two_ranks()
    status, told = await reload(tmp_path, engine, settings={"drafter": {"method": method}})
    assert status.ok and status.drafting and status.version == 4 and told[-1]["drafting"] is True
    assert (("tlt_load_drafter",) in engine.asked) == (method == "eagle3" or not trains)


@pytest.mark.parametrize(("accepted", "found"), [(False, b"whole"), (True, b"half")])
async def test_a_file_that_was_refused_is_written_again_before_the_next_load(tmp_path, accepted, found):
    stage("{}", b"half", tmp_path / "drafter")
    before = DrafterStatus(version=3, ok=accepted, reloads=7)
    await reload(tmp_path, two_ranks(), replace(NEW, weights=b"whole"), before=before)
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == found


class Drafter(torch.nn.Module):
    """One layer, and vLLM's way to load it."""

    def load_weights(self, tensors):
        self.model.fc.weight.copy_(dict(tensors)["fc.weight"])


class Rank(TLTWorkerExtension):
    """Our extension around a drafter of one layer, in place of vLLM's worker."""

    @staticmethod
    def on_this_node(started_with):
        rank = object.__new__(Rank)
        target, drafter = torch.nn.Module(), Drafter()
        target.embed_tokens = torch.nn.Embedding(3, 2)
        drafter.model = torch.nn.Module()
        drafter.model.embed_tokens, drafter.model.fc = target.embed_tokens, torch.nn.Linear(2, 2, bias=False)
        rank.model_runner = SimpleNamespace(drafter=SimpleNamespace(model=drafter), get_model=lambda: target)
        config = VllmConfig()
        config.speculative_config = SimpleNamespace(model=str(started_with))
        rank.tlt_drafter = LiveDrafter(rank.model_runner, config)
        return rank


def on_node(monkeypatch, directories, node, rank):
    """The answer of one node's rank, which sees its own environment and its own files."""
    others = [d for d in directories if d != directories[node]]
    hidden = {d: d.rename(d.with_name(f"{d.name}-of-another-machine")) for d in others}
    monkeypatch.setenv(STAGE_DIR, str(directories[node] / "drafter"))
    try:
        return rank.tlt_load_drafter()
    finally:
        for directory, elsewhere in hidden.items():
            os.rename(elsewhere, directory)


async def test_every_node_of_a_replica_loads_what_was_staged_there(tmp_path, monkeypatch):
    weights = {"fc.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    drafter = DrafterFile(version=4, config="{}", weights=save(weights), acceptance=(0.8, 0.7))
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        stage(drafter.config, drafter.weights, directory / "drafter")
    ranks = [Rank.on_this_node(directory / "drafter") for directory in directories]

    def loads():
        return [on_node(monkeypatch, directories, node, rank) for node, rank in enumerate(ranks)]

    status, _ = await reload(directories[0], two_ranks(loads), drafter)
    assert (status.ok, status.error, status.version) == (True, None, 4)
    assert status.drafting
    for rank in ranks:
        torch.testing.assert_close(rank.model_runner.drafter.model.model.fc.weight.detach(), weights["fc.weight"])
