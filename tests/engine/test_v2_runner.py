"""OFF, any K, and a drafter of NaN, in a real engine on vLLM's V2 model runner.

Its kernels run in Triton's interpreter: no GPU is needed.
"""

import pytest
from tiny_engine import run_script

from verl_tlt.speculation.graph_rules import V2_DRAFTS_FROM
from verl_tlt.upstream.versions import installed, release

pytestmark = [pytest.mark.engine, pytest.mark.heavy]


ANY_K = release(installed("vllm") or "0.0")[:2] >= V2_DRAFTS_FROM
DRAFTING = ("drafting", "drafting again", "after a sync", "after NaN and a sync")
OF_NAN = ("NaN", "NaN that nobody replaces")


@pytest.fixture(scope="module")
def found(models):
    pytest.importorskip("triton")
    return run_script("v2_engine.py", models["target"], models["good"], "any K" if ANY_K else "K_max")


def test_off_runs_no_drafter_and_everything_else_does(found):
    assert found["runner"] == "vllm.v1.worker.gpu.model_runner"
    off, k0 = found["OFF"], found["K=0"]
    assert off["passes"] == 0 and list(off["steps"]) == ["-1"]
    assert k0["passes"] >= 15 and list(k0["steps"]) == ["0"], "what OFF saves"
    for name in (*DRAFTING, "OFF, and the scheduler did not hear of it"):
        assert found[name]["passes"] >= 3 * found[name]["steps"]["3"] > 0, name


def test_no_token_depends_on_it(found):
    stock = found["transformers"]["tokens"]
    greedy = [way["tokens"] for name, way in found.items() if name not in OF_NAN and name != "runner"]
    assert not ANY_K or {"0", "1", "2", "3"} <= found["any K"]["steps"].keys()
    assert len(greedy) == 8 + ANY_K and all(tokens == stock for tokens in greedy)


def token_0(way):
    """How many tokens 0 were said, of how many tokens."""
    said = [token for tokens in way["tokens"] for token in tokens]
    return said.count(0), len(said)


def test_a_drafter_of_nan_puts_no_token_0_in_the_place_of_its_drafts(found):
    guarded, unguarded = (found[name] for name in OF_NAN)
    assert guarded["steps"]["3"] > 0, "it drafts on"
    zeros, tokens = token_0(guarded)
    assert zeros < 0.2 * tokens
    zeros, tokens = token_0(unguarded)
    assert zeros > 0.5 * tokens and not unguarded["accepted"], "what this is about makes no difference here"


def test_what_is_loaded_afterwards_drafts_as_before(found):
    first, *later = (found[name]["accepted"] for name in DRAFTING)
    assert first > 10 and later == [first] * len(later)
