"""A drafter whose weights are no numbers, or whose pass raises, leaves the target's distribution."""

import pytest
import torch
from draws import HOT, draw, exact_models, p_values

from benchmarks.lossless.judged import FAILS

pytestmark = pytest.mark.engine

DRAWS = 300
SMALL = {"family": "qwen3-small", "max_num_seqs": 64, "policy": "policies:longest"}


@pytest.fixture(scope="module")
def exact(models):
    return exact_models(models)["qwen3"]


@pytest.fixture(scope="module", autouse=True)
def not_kept(engine_of):
    """NaN stays in the drafter's KV cache, so whoever asks for such an engine next gets another one."""
    yield
    engine_of.close()


@pytest.fixture
def engine(engine_of):
    with engine_of("good", **SMALL) as started:
        yield started


def make_nan(engine):
    """Other numbers than NaN that make no distribution are in test_finite_logits.py."""
    with torch.no_grad():
        engine.runner.drafter.model.model.fc.weight[0, 0] = float("nan")


def test_its_drafts_leave_the_targets_distribution(engine, exact):
    make_nan(engine)
    chi, martingale = p_values(exact, draw(engine, HOT, DRAWS), HOT)
    stats = engine.scheduler.tlt.stats()
    assert sum(stats.num_draft_tokens_per_pos) > 10 * DRAWS
    assert chi > FAILS and martingale > FAILS


def test_with_the_logits_that_it_computes_they_would_not(engine):
    make_nan(engine)
    engine.patch.delattr(engine.runner.drafter.model, "compute_logits")  # ours; the class has vLLM's
    for outputs in draw(engine, HOT, DRAWS):
        assert (outputs[:, 1:] == 0).mean() > 0.4, "NaN does not fool the rejection sampler: drop `finite_logits`?"


def test_drafts_in_place_of_a_pass_that_raises_leave_the_targets_distribution(engine, exact):
    """They are token 0 throughout, and verified."""

    def fail(*_args, **_kwargs):
        raise ArithmeticError("broken by a test")

    engine.patch.setattr(engine.drafters_pass, "failure", "")  # as it is after this test
    engine.patch.setattr(engine.runner.drafter.model, "forward", fail)
    chi, martingale = p_values(exact, draw(engine, HOT, DRAWS), HOT)
    assert sum(engine.scheduler.tlt.stats().num_draft_tokens_per_pos) > 10 * DRAWS and engine.drafters_pass.failure
    assert chi > FAILS and martingale > FAILS
