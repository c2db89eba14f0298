"""OFF, any K, a drafter of NaN, and an MTP head, in a real engine on vLLM's V2 model runner.

Its kernels run in Triton's interpreter: no GPU is needed.
"""

import pytest
from mtp_policies import build_mtp_policy, save_head
from tiny_engine import run_script

from benchmarks.lossless.tiny_policy import V
from verl_tlt.speculation.graph_rules import V2_DRAFTS_FROM
from verl_tlt.upstream.versions import installed, release

pytestmark = [pytest.mark.engine, pytest.mark.heavy]


ANY_K = release(installed("vllm") or "0.0")[:2] >= V2_DRAFTS_FROM
DRAFTING = ("drafting", "drafting again", "after a sync", "after NaN and a sync")
OF_NAN = ("NaN", "NaN in every step", "NaN that nobody replaces")


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def found(request, models):
    pytest.importorskip("triton")
    target, good = models["target"], models["good"]
    if request.param == "mtp":
        if not ANY_K:
            pytest.skip("runs where vLLM's V2 model runner drafts any K, from 0.32 on: `make test-releases`")
        target, good = target.parent / "mtp-target", target.parent / "mtp-good"
        save_head(good, build_mtp_policy(target, "mimo", V))
    return run_script("v2_engine.py", target, good, request.param, "any K" if ANY_K else "K_max")


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
    """Its drafts are token 0, each as probable as the policy has it: what is not accepted is another token."""
    told, kept, unguarded = (found[name] for name in OF_NAN)
    assert told["broken"] > 0 and told["steps"]["-1"] > 0, "the scheduler heard of it"
    assert kept["steps"]["3"] > told["steps"].get("3", 0), "it did not"
    assert token_0(told)[0] == 0 and token_0(kept)[0] == kept["accepted"] < 3
    zeros, tokens = token_0(unguarded)
    assert zeros > 0.5 * tokens and not unguarded["accepted"], "what this is about makes no difference here"


def test_what_is_loaded_afterwards_drafts_as_before(found):
    first, *later = (found[name]["accepted"] for name in DRAFTING)
    assert first > 10 and later == [first] * len(later)
    assert not any(found[name]["broken"] for name in DRAFTING)
