"""A drafter that drafts a part of the policy's tokens: chosen by a rollout, published, served, and lossless there."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from actor import free_port
from drafter_bits import holds
from draws import HOT, draw, exact_models, p_values
from safetensors.torch import load_file, save_file
from tiny_engine import run_script

from benchmarks.lossless.judged import FAILS
from benchmarks.lossless.tiny_policy import SMALL, V, build_drafter_dir
from verl_tlt.drafter import (
    VerifierWeights,
    build_drafter,
    most_frequent,
    refresh_verifier_weights,
    save_drafter,
    to_numpy16,
)
from verl_tlt.drafter.checkpoint import stage
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import SpotPlan, VerifierArrays
from verl_tlt.spot_trainer.trainer import SpotTrainer

pytestmark = pytest.mark.engine

SIZE = 192


@pytest.fixture(scope="module")
def first(models, tmp_path_factory):
    """What a run starts with, but for a drafter that knows the present token: its tokens are not chosen yet."""
    models["first"] = path = tmp_path_factory.mktemp("staged") / "first"
    build_drafter_dir(path, models["target"], informed=True, draft_ids=SIZE)
    return DrafterFile(0, (path / "config.json").read_text(), (path / "model.safetensors").read_bytes())


@pytest.fixture(scope="module")
def published(models, first, stock_tokens, tmp_path_factory):
    """(the tokens of the first rollout, the file that the spot trainer publishes after it)."""
    said = np.concatenate(stock_tokens)
    ids = most_frequent(np.bincount(said, minlength=V), SIZE).numpy()
    assert np.isin(said, ids).mean() > 0.9
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    spot = SpotTrainer(SpotPlan(policy_dir=str(models["target"]), drafter=first, sampling=sampling, dtype="float32"))
    parts = VerifierWeights.from_policy_dir(models["target"])
    arrays = VerifierArrays(*(to_numpy16(part.bfloat16()) for part in (parts.embed, parts.lm_head, parts.norm)))
    spot.add(1, [], arrays, ids)
    spot._approved = spot.candidate
    file = spot.export()
    directory = tmp_path_factory.mktemp("published")
    stage(file.config, file.weights, directory)
    return ids, directory / "model.safetensors", file


@pytest.fixture
def engine(engine_of, first):
    with engine_of("first", policy="policies:longest") as started:
        yield started


def accepted(engine, tokens):
    """The share of drafts whose first token is accepted, over requests whose tokens are stock vLLM's."""
    engine.scheduler.tlt.stats(reset=True)
    assert engine.generate(8, 96) == tokens
    stats = engine.scheduler.tlt.stats(reset=True)
    return stats.num_accepted_tokens_per_pos[0] / stats.num_drafts


def test_what_the_first_rollout_chose_is_drafted_once_it_is_published(engine, first, published, stock_tokens):
    ids, file, _ = published
    before = accepted(engine, stock_tokens)
    assert engine.rpc("tlt_load_drafter", str(file)) is None and holds(engine, file, leave_out=["lm_head.weight"])
    offsets = engine.runner.drafter.model.draft_id_to_target_id
    assert (torch.arange(SIZE) + offsets).tolist() == ids.tolist()
    assert accepted(engine, stock_tokens) > before + 0.1


def test_its_head_follows_every_weight_sync_whatever_rows_the_file_has(engine, published, tmp_path):
    """The file's rows are those of the policy that the spot trainer knew, in 16 bits: they are not even read."""
    ids, file, _ = published
    head, own = engine.runner.get_model().lm_head.weight, engine.runner.drafter.model.lm_head.weight
    assert own.shape[0] < head.shape[0]
    assert engine.rpc("tlt_load_drafter", str(file)) is None
    assert torch.equal(own[:SIZE], head[ids]) and not torch.equal(own[:SIZE], load_file(file)["lm_head.weight"])
    with torch.no_grad():
        before = head.clone()
        head.add_(torch.randn(head.shape, generator=torch.Generator().manual_seed(3)))
    try:
        assert engine.rpc("tlt_load_drafter", str(file)) is None
        assert torch.equal(own[:SIZE], head[ids])
        tensors = load_file(file)
        tensors["lm_head.weight"].fill_(torch.nan)
        save_file(tensors, tmp_path / "model.safetensors")
        assert engine.rpc("tlt_load_drafter", str(tmp_path / "model.safetensors")) is None
        assert torch.equal(own[:SIZE], head[ids])
    finally:
        head.data.copy_(before)


@pytest.fixture(scope="module")
def own_head(models, tmp_path_factory):
    """A drafter like the first one, with a head that was trained for itself."""
    drafter = build_drafter(models["target"], draft_ids=torch.arange(SIZE))
    refresh_verifier_weights(drafter, VerifierWeights.from_policy_dir(models["target"]))
    drafter.config.own_head = True
    with torch.no_grad():
        drafter.lm_head.weight.mul_(1.5)
    return save_drafter(drafter, tmp_path_factory.mktemp("own") / "drafter", {}) / "model.safetensors"


def test_a_head_of_its_own_stays_as_it_is_in_the_file(engine, own_head, published):
    head, own = engine.runner.get_model().lm_head.weight, engine.runner.drafter.model.lm_head.weight
    assert engine.rpc("tlt_load_drafter", str(own_head)) is None and holds(engine, own_head)
    assert not torch.equal(own[:SIZE], head[:SIZE])
    ids, file, _ = published
    assert engine.rpc("tlt_load_drafter", str(file)) is None and torch.equal(own[:SIZE], head[ids])


def test_a_drafter_of_another_size_is_refused(engine, models, published, tmp_path):
    build_drafter_dir(tmp_path / "other", models["target"], informed=False, draft_ids=SIZE - 1)
    answer = engine.rpc("tlt_load_drafter", str(tmp_path / "other" / "model.safetensors"))
    assert "the served drafter" in answer
    assert engine.rpc("tlt_load_drafter", str(published[1])) is None


@pytest.mark.heavy
def test_ranks_that_hold_other_rows_of_the_policys_head_each_get_their_part_and_fail_together():
    """What one rank cannot read or write no rank serves; none waits for it, and the next load is whole again."""
    port = free_port()
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda rank: run_script("head_ranks.py", rank, port), range(2)))
    assert [of["same"] for of in found] == [[True, True]] * 2
    failures = "refuses the drafter's file", "could not write the drafter"
    assert found[0]["refused"] == [f"Another rank of this engine {failure}." for failure in failures]
    assert found[1]["refused"] == ["/nowhere does not exist.", "out of memory"]


def test_sampled_tokens_have_the_targets_distribution(engine_of, models, tmp_path_factory):
    """Half of the tokens can be drafted, and all of them come as often as without a drafter."""
    ids = torch.arange(0, SMALL, 2)
    models["qwen3-small-half"] = tmp_path_factory.mktemp("half") / "drafter"
    build_drafter_dir(models["qwen3-small-half"], models["qwen3-small-target"], informed=True, draft_ids=ids)
    with engine_of("half", family="qwen3-small", max_num_seqs=64, policy="policies:longest") as engine:
        drawn = draw(engine, HOT)
        stats, probabilities = engine.scheduler.tlt.stats(), engine.runner._draft_probs
    assert 0.1 < stats.num_accepted_tokens_per_pos[0] / stats.num_drafts < 0.95
    assert not probabilities[..., 1::2].any() and probabilities[..., ids].sum(-1).allclose(torch.ones(()))
    said = np.concatenate([outputs.ravel() for outputs in drawn])
    assert set(said) == set(range(SMALL))
    chi, martingale = p_values(exact_models(models)["qwen3"], drawn, HOT)
    assert chi > FAILS and martingale > FAILS
