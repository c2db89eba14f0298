"""A drafter whose weights are no numbers, or make none, costs its drafts and no token, and is off until replaced."""

import dataclasses
import logging

import pytest
import torch
from draws import HOT, draw, exact_models, p_values

from benchmarks.lossless.judged import FAILS
from verl_tlt.speculation.types import OFF
from verl_tlt.vllm_worker.draft_probabilities import kv_caches

pytestmark = pytest.mark.engine

DRAWS = 300
GREEDY = dataclasses.replace(HOT, temperature=0.0)
SMALL = {"family": "qwen3-small", "max_num_seqs": 64, "policy": "policies:longest"}


@pytest.fixture(scope="module")
def exact(models):
    return exact_models(models)["qwen3"]


@pytest.fixture
def engine(engine_of):
    with engine_of("good", **SMALL) as started:
        yield started
        started.rpc("tlt_set_drafting", True)


def own_weights(engine):
    policys = {id(p) for p in engine.runner.get_model().parameters()}
    return [p for p in engine.runner.drafter.model.parameters() if id(p) not in policys and p.is_floating_point()]


def break_drafter(engine, how):
    with torch.no_grad():
        for weight in own_weights(engine):
            if how == "huge":
                weight.mul_(1e30)
            else:
                weight.view(-1)[0] = float(how)


def drafter_caches(engine):
    layers = engine.runner.vllm_config.compilation_config.static_forward_context
    return [cache for name in engine.runner.drafter._draft_attn_layer_names for cache in kv_caches(layers[name])]


@pytest.mark.parametrize("how", ["nan", "inf", "huge"])
def test_its_drafts_leave_the_targets_distribution(engine, exact, how):
    """It is kept drafting, so that every draft of the run is a broken one."""
    dropped = []
    engine.patch.setattr(engine.scheduler.tlt, "drafter_broke", dropped.append)
    break_drafter(engine, how)
    chi, martingale = p_values(exact, draw(engine, HOT, DRAWS), HOT)
    stats = engine.scheduler.tlt.stats()
    assert sum(dropped) > 0.99 * stats.num_draft_tokens > 10 * DRAWS
    assert not any(stats.num_accepted_tokens_per_pos)
    assert chi > FAILS and martingale > FAILS


def test_without_the_guard_they_would_not(engine):
    """The rows are counted and left as they are."""
    guard = engine.core.model_executor.driver_worker.worker.tlt_broken
    engine.patch.setattr(guard, "_drop", lambda probs: (guard._dropped.add_(1), probs)[1])
    engine.patch.setattr(engine.scheduler.tlt, "drafter_broke", lambda _: None)
    break_drafter(engine, "nan")
    for outputs in draw(engine, HOT, DRAWS):
        assert (outputs[:, 1:] == 0).mean() > 0.4, "NaN does not fool the rejection sampler any more: drop the guard?"


def test_it_goes_off_and_another_one_starts_with_a_clean_cache(engine, exact, models, caplog):
    control, good = engine.scheduler.tlt, str(models["qwen3-small-good"] / "model.safetensors")
    control.stats(reset=True)
    draw(engine, GREEDY, 8)
    before = control.stats(reset=True)
    break_drafter(engine, "nan")
    with caplog.at_level(logging.ERROR):
        logging.getLogger("verl_tlt").addHandler(caplog.handler)
        draw(engine, HOT, 64)
        logging.getLogger("verl_tlt").removeHandler(caplog.handler)
    off = control.stats(reset=True)
    assert not control.drafting and engine.runner.drafter.tlt_drafting is False
    assert 0 < off.num_broken_drafts <= 3 * 64 * 3, "a few steps at most"
    assert off.steps_by_draft_length[OFF] > 0.8 * off.num_steps
    assert len({r.getMessage() for r in caplog.records if "are not finite" in r.getMessage()}) == 1
    assert any(cache.isnan().any() for cache in drafter_caches(engine)), "what clearing is about is not there"

    assert engine.rpc("tlt_load_drafter", good)["ok"]
    assert engine.rpc("tlt_set_drafting", True) is None
    control.control(drafting=True)
    draw(engine, GREEDY, 8)
    assert not any(cache.isnan().any() for cache in drafter_caches(engine))
    again = control.stats(reset=True)
    assert again.num_accepted_tokens_per_pos == before.num_accepted_tokens_per_pos
    chi, martingale = p_values(exact, draw(engine, HOT, DRAWS), HOT)
    assert chi > FAILS and martingale > FAILS
    assert control.drafting and control.stats().num_broken_drafts == 0
