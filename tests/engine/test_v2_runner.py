"""OFF in a real engine on vLLM's V2 model runner, whose kernels run in Triton's interpreter: no GPU is needed."""

import pytest
from tiny_engine import run_script

pytestmark = [pytest.mark.engine, pytest.mark.heavy]


@pytest.fixture(scope="module")
def found(models):
    pytest.importorskip("triton")
    return run_script("v2_engine.py", models["target"], models["good"])


def test_off_runs_no_drafter_and_everything_else_does(found):
    assert found["runner"] == "vllm.v1.worker.gpu.model_runner"
    off, k0 = found["OFF"], found["K=0"]
    assert off["passes"] == 0 and list(off["steps"]) == ["-1"]
    assert k0["passes"] >= 15 and list(k0["steps"]) == ["0"], "what OFF saves"
    for name in ("drafting", "OFF, and the scheduler did not hear of it", "drafting again", "after a sync"):
        assert found[name]["passes"] >= 3 * found[name]["steps"]["3"] > 0, name
    assert (
        found["drafting"]["accepted"] == found["drafting again"]["accepted"] == found["after a sync"]["accepted"] > 20
    )


def test_no_token_depends_on_it(found):
    stock = found.pop("transformers")["tokens"]
    assert all(way["tokens"] == stock for way in found.values() if isinstance(way, dict))
