"""An engine through verl's sleep and wake, on a CPU that forgets as a GPU does: what is touched too early ends it.

The order around a weight sync is verl's (`Engine.sync`).
"""

import asyncio

import pytest
import torch
from drafter_bits import live_fingerprint
from tiny_engine import DoctorsEngine, sampled

from benchmarks.lossless.tiny_policy import build_drafter_dir
from verl_tlt.commands.doctor.engine_check import check_sleep
from verl_tlt.upstream.versions import installed, release

pytestmark = pytest.mark.engine

TOKENS = 48


@pytest.fixture
def file(models):
    """The drafter's."""
    return models["alike"] / "model.safetensors"


@pytest.fixture(scope="module")
def engine(engine_of, models, tmp_path_factory):
    """Its drafter has the policy's longest context, so one rotary table serves both."""
    models["alike"] = tmp_path_factory.mktemp("alike") / "drafter"
    build_drafter_dir(models["alike"], models["target"], informed=True, max_position_embeddings=1024)
    with engine_of("alike", enable_sleep_mode=True, policy="policies:longest") as started:
        yield started


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sync_it_decodes_and_accepts_as_before(engine, file, level):
    before = engine.rollout(TOKENS)
    live = live_fingerprint(engine)
    assert sum(before[1]) > 0
    assert engine.sync(file, level) is None
    assert live_fingerprint(engine) == live
    assert engine.rollout(TOKENS) == before


def test_a_drafter_of_nan_leaves_nothing_behind_in_the_next_rollout(engine, file):
    before = engine.rollout(TOKENS)
    with torch.no_grad():
        engine.runner.drafter.model.model.fc.weight.fill_(float("nan"))
    engine.llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampled(32, temperature=1.0), use_tqdm=False)
    assert engine.sync(file) is None
    tokens, accepted = engine.rollout(TOKENS)
    assert tokens == before[0]
    if release(installed("vllm"))[:2] == (0, 31):  # its CPU attention reads the rest of a block: 0 times NaN is NaN
        assert sum(accepted) > 0.9 * sum(before[1])
    else:
        assert accepted == before[1]


@pytest.fixture
def table(engine, file):
    """The rotary table of policy and drafter; both are as they were after the test."""
    found = engine.runner.get_model().model.layers[0].self_attn.rotary_emb.cos_sin_cache
    assert engine.runner.drafter.model.model.layers[0].self_attn.rotary_emb.cos_sin_cache is found
    sound = found.clone()
    yield found
    found.copy_(sound)
    assert engine.sync(file) is None


def test_a_ruined_table_is_named_and_not_written_where_it_is_the_policys_too(engine, file, table):
    """No load can restore what is the policy's, so nothing is drafted with it."""
    sound = live_fingerprint(engine)
    assert engine.sync(file) is None and live_fingerprint(engine) == sound
    table.zero_()
    assert live_fingerprint(engine) != sound
    answer = engine.sync(file)
    assert "rotary_emb.cos_sin_cache" in answer
    assert not table.any()


def test_the_doctor_finds_out_that_a_table_did_not_survive(engine, models, table):
    """vLLM keeps a model's buffers at level 2; a release that does not would leave the table as the pages are."""
    for lost, level in ((lambda: None, "ok"), (lambda: table.fill_(float("nan")), "refuse")):
        found = asyncio.run(check_sleep(DoctorsEngine(engine, models["alike"], lost)))
        assert found.level == level and ("loaded again after sleep" in found.sentence) == (level == "ok"), found
    assert "cos_sin_cache" in found.sentence
