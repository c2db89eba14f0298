"""The CUDA-graph plan as data: which arms a release gets, what runs without a graph, and the table in the docs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_tlt.speculation.graph_rules import PLANS, capture_sizes, graph_for, plan_for, table, token_limit

DOCS = Path(__file__).parents[3] / "docs" / "adaptive-speculation.md"


def test_the_docs_show_the_plan():
    assert table() in DOCS.read_text()


@pytest.mark.parametrize(
    ("release", "first", "arms"),
    [
        ((0, 24), (0, 24), (0, 1, 3)),
        ((0, 25), (0, 24), (0, 1, 3)),
        ((0, 27), (0, 26), (0, 1, 3, 7)),
        ((0, 40), (0, 32), (0, 1, 3, 7)),
    ],
)
def test_a_release_between_two_plans_takes_the_older(release, first, arms):
    assert (plan_for(release).first, plan_for(release).arms) == (first, arms)


def test_arms_divide_every_captured_size():
    for plan in PLANS:
        for size in capture_sizes(256, plan.arms[-1]):
            assert all(size % (1 + k) == 0 for k in plan.arms)


def test_memory_is_not_multiplied_by_arms():
    # Rounding leaves fewer sizes than vLLM captures without a drafter.
    assert len(capture_sizes(256, 7)) <= len(capture_sizes(256, 3)) <= len(capture_sizes(256, 0))
    assert capture_sizes(256, 3)[:4] == [4, 8, 16, 24] and capture_sizes(256, 3)[-1] == 512
    assert capture_sizes(2, 3) == [4, 8, 16]


@pytest.mark.parametrize(
    ("batch", "k", "expected"),
    [
        (1, 3, ("FULL", 4)),
        (1, 0, ("PIECEWISE", 4)),
        (5, 1, ("PIECEWISE", 16)),
        (128, 3, ("FULL", 512)),
        (129, 3, ("eager", 516)),
        (256, 1, ("PIECEWISE", 512)),
    ],
)
def test_what_a_step_runs_on_with_the_longest_draft_of_three(batch, k, expected):
    assert graph_for(batch, k, 3, capture_sizes(256, 3), 256) == expected


def test_the_limit_is_that_of_the_resolved_config():
    def limit(eager=False, mode="FULL_AND_PIECEWISE", largest=510):
        compilation = SimpleNamespace(max_cudagraph_capture_size=largest, cudagraph_mode=SimpleNamespace(name=mode))
        model = SimpleNamespace(enforce_eager=eager)
        return token_limit(
            SimpleNamespace(compilation_config=compilation, model_config=model, num_speculative_tokens=3)
        )

    assert limit() == 508
    assert limit(eager=True) == limit(mode="NONE") == limit(largest=None) == 0
