"""Tokens drawn on vLLM's V2 model runner have exactly the policy's distribution, whatever K does; and this can fail.

Its kernels run in Triton's interpreter: no GPU is needed, and few tokens are drawn.
"""

import numpy as np
import pytest
from draws import CAUGHT, HOT, PROMPTS, p_values
from tiny_engine import run_script

from benchmarks.lossless.exact import Exact
from benchmarks.lossless.judged import FAILS
from verl_tlt.speculation.graph_rules import V2_DRAFTS_FROM
from verl_tlt.upstream.versions import installed, release

pytestmark = [pytest.mark.engine, pytest.mark.heavy]

DRAWS, LIMIT_S = 100, 950
"""Of each prompt; the interpreter needs a tenth of a second for each token."""


@pytest.fixture(scope="module")
def found(models):
    """(the policy as transformers computes it, what `v2_draws.py` found)."""
    pytest.importorskip("triton")
    if release(installed("vllm") or "0.0")[:2] < V2_DRAFTS_FROM:
        pytest.skip("runs where vLLM's V2 model runner drafts any K, from 0.32 on: `make test-releases`")
    target, good = models["qwen3-small-target"], models["qwen3-small-good"]
    return Exact(target), run_script("v2_draws.py", target, good, str(DRAWS), timeout=LIMIT_S)


def judge(found, way):
    """(chi-square, martingale), of which the former sees drafted tokens from some hundred draws on."""
    exact, ways = found
    return p_values(exact, [np.array(outputs) for outputs in ways[way]["outputs"]], HOT)


def test_outputs_have_the_policys_distribution(found):
    way = found[1]["any K"]
    assert {"0", "1", "2", "3"} <= way["steps"].keys()
    assert 0.2 < way["accepted"] / way["drafts"] < 2.0
    assert min(judge(found, "any K")) > FAILS


def test_the_log_probabilities_told_are_those_of_the_tokens(found):
    exact, ways = found
    for prompt, outputs in zip(PROMPTS, ways["told"], strict=True):
        for tokens, told in outputs:
            assert told == pytest.approx(exact.of_tokens(list(prompt), tokens, None), abs=1e-3)


def test_a_sampler_that_accepts_one_draft_too_many_is_caught(found):
    assert judge(found, "one too many")[1] < CAUGHT
