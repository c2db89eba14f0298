"""The CUDA-graph plan as data: which arms a release gets, what runs without a graph, and the table in the docs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_tlt.speculation.graph_rules import longest_draft, plan_for, table, token_limit

DOCS = Path(__file__).parents[3] / "docs" / "adaptive-speculation.md"


def test_the_docs_show_the_plan():
    assert table() in DOCS.read_text()


@pytest.mark.parametrize(
    ("release", "first", "arms"),
    [
        ((0, 24), (0, 24), (0, 1, 3, 7)),
        ((0, 25), (0, 24), (0, 1, 3, 7)),
        ((0, 27), (0, 26), (0, 1, 3, 7)),
        ((0, 40), (0, 32), (0, 1, 3, 7)),
    ],
)
def test_a_release_between_two_plans_takes_the_older(release, first, arms):
    assert (plan_for(release).first, plan_for(release).arms) == (first, arms)


@pytest.mark.parametrize("release", [(0, 24), (0, 28), (0, 31)])
def test_the_longest_draft_is_longer_where_every_arm_has_its_graph(release):
    assert longest_draft(release, graphs=True) == plan_for(release).arms[-1] == 7
    assert longest_draft(release, graphs=False) == longest_draft((0, 32), graphs=True) == 3


def test_the_limit_is_that_of_the_resolved_config():
    def limit(eager=False, mode="FULL_AND_PIECEWISE", largest=510):
        compilation = SimpleNamespace(max_cudagraph_capture_size=largest, cudagraph_mode=SimpleNamespace(name=mode))
        model = SimpleNamespace(enforce_eager=eager)
        return token_limit(
            SimpleNamespace(compilation_config=compilation, model_config=model, num_speculative_tokens=3)
        )

    assert limit() == 508
    assert limit(eager=True) == limit(mode="NONE") == limit(largest=None) == 0
