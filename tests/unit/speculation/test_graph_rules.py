"""What a vLLM release runs drafts with, and how long a draft and a step may be with CUDA graphs."""

from types import SimpleNamespace

import pytest

from verl_tlt.speculation.graph_rules import GRAPH_ARMS, longest_draft, runner_for, token_limit


@pytest.mark.parametrize("release", [(0, 24), (0, 28), (0, 31)])
def test_the_longest_draft_is_longer_where_every_arm_has_its_graph(release):
    assert runner_for(release) == "V1"
    assert longest_draft(release, graphs=True) == GRAPH_ARMS[-1]
    assert longest_draft(release, graphs=False) == 3


@pytest.mark.parametrize("release", [(0, 32), (0, 40), (1, 0)])
def test_the_v2_runner_has_the_graph_of_the_longest_arm_alone(release):
    assert runner_for(release) == "V2"
    assert longest_draft(release, graphs=True) == 3


def test_the_limit_is_that_of_the_resolved_config():
    def limit(eager=False, mode="FULL_AND_PIECEWISE", largest=510):
        compilation = SimpleNamespace(max_cudagraph_capture_size=largest, cudagraph_mode=SimpleNamespace(name=mode))
        model = SimpleNamespace(enforce_eager=eager)
        return token_limit(
            SimpleNamespace(compilation_config=compilation, model_config=model, num_speculative_tokens=3)
        )

    assert limit() == 508
    assert limit(eager=True) == limit(mode="NONE") == limit(largest=None) == 0
