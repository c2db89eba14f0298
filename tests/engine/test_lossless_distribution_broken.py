"""A drafter whose weights are no numbers, or make none, or whose pass raises, leaves the target's distribution."""

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


@pytest.fixture
def engine(engine_of):
    with engine_of("good", **SMALL) as started:
        yield started


def break_drafter(engine, how):
    policys = {id(p) for p in engine.runner.get_model().parameters()}
    own = [p for p in engine.runner.drafter.model.parameters() if id(p) not in policys and p.is_floating_point()]
    with torch.no_grad():
        for weight in own:
            if how == "huge":
                weight.mul_(1e30)
            else:
                weight.view(-1)[0] = float(how)


@pytest.mark.parametrize("how", ["nan", "inf", "huge"])
def test_its_drafts_leave_the_targets_distribution(engine, exact, how):
    break_drafter(engine, how)
    chi, martingale = p_values(exact, draw(engine, HOT, DRAWS), HOT)
    stats = engine.scheduler.tlt.stats()
    assert stats.num_draft_tokens > 10 * DRAWS
    assert chi > FAILS and martingale > FAILS


def test_with_the_logits_that_it_computes_they_would_not(engine):
    break_drafter(engine, "nan")
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
    assert engine.scheduler.tlt.stats().num_draft_tokens > 10 * DRAWS and engine.drafters_pass.failure
    assert chi > FAILS and martingale > FAILS
