"""Sampled tokens have exactly the target's distribution, whoever chooses K; and these tests can fail.

The vocabulary is small, so that every output of a few tokens can be enumerated (draws.py).
"""

from __future__ import annotations

import pytest
from draws import CAUGHT, COOL, HOT, draw, exact_models, p_values

from benchmarks.lossless.judged import FAILS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def exact(models):
    return exact_models(models)


def propose_often(engine):
    """n-grams wherever the match has an odd length, however seldom they are accepted: many rows of either kind.

    Returns a list to which each verified n-gram adds whether its first token was accepted.
    """
    trust, verified = engine.scheduler.tlt_ngram.index.trust, []
    trust.of = lambda matched: float(matched % 2)
    trust.learn = lambda matched, accepted: verified.append(accepted)
    return verified


SETUPS = {
    "ngrams-alone": ("llama", {"policy": "policies:longest", "speculation": {"source": "ngram"}}),
    "random": ("llama", {"policy": "policies:rand"}),
    "live_table-under-pressure": (
        "qwen3",
        {
            "speculation": {"policy": "live_table"},
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 64,
            "num_gpu_blocks_override": 20,
            "block_size": 32,
            "max_model_len": 64,
        },
    ),
}


@pytest.mark.parametrize(
    ("setup", "sampling"),
    [
        ("ngrams-alone", HOT),
        pytest.param("ngrams-alone", COOL, marks=pytest.mark.heavy),
        ("random", HOT),
        ("random", COOL),
        ("live_table-under-pressure", HOT),
        pytest.param("live_table-under-pressure", COOL, marks=pytest.mark.heavy),
    ],
    ids=lambda value: value if isinstance(value, str) else f"T={value.temperature}",
)
def test_outputs_have_the_targets_distribution(engine_of, exact, setup, sampling):
    family, arguments = SETUPS[setup]
    with engine_of("good", **{"family": f"{family}-small", "max_num_seqs": 64, **arguments}) as engine:
        verified = propose_often(engine) if engine.scheduler.tlt_ngram else None
        chi, martingale = p_values(exact[family], draw(engine, sampling), sampling)
        stats = engine.scheduler.tlt.stats()
        assert 0.1 < stats.num_accepted_tokens_per_pos[0] / stats.num_drafts < 0.95
        assert verified is None or len(verified) > 1000
        assert chi > FAILS and martingale > FAILS


def accept_too_willingly(engine):
    """A biased sampler: the drafter's probabilities look half as large as those the drafts were drawn with."""
    sampler = engine.runner.rejection_sampler
    engine.patch.setattr(
        engine.runner,
        "rejection_sampler",
        lambda metadata, q, *rest: sampler(metadata, q if q is None else q / 2, *rest),
    )


def cut_doubtful_drafts(engine):
    """A K that peeks: every draft ends before its first token that the drafter itself held unlikely."""
    update = engine.scheduler.update_draft_token_ids

    def peek(drafts):
        if engine.runner._draft_probs is not None:
            for row, q in zip(drafts.draft_token_ids, engine.runner._draft_probs, strict=True):
                doubtful = [i for i, token in enumerate(row) if q[i, token] < 0.5]
                del row[min(doubtful, default=len(row)) :]
        update(drafts)

    engine.patch.setattr(engine.scheduler, "update_draft_token_ids", peek)


@pytest.mark.parametrize("sabotage", [accept_too_willingly, cut_doubtful_drafts])
def test_both_tests_catch_what_is_not_lossless(engine_of, exact, sabotage):
    with engine_of("good", family="qwen3-small", max_num_seqs=64, policy="policies:longest") as engine:
        sabotage(engine)
        chi, martingale = p_values(exact["qwen3"], draw(engine, HOT), HOT)
    assert chi < CAUGHT
    assert martingale < CAUGHT
