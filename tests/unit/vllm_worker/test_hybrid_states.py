"""An engine in which a hybrid policy would decode wrong tokens does not start with a drafter."""

from types import SimpleNamespace

import numpy as np
import pytest

from verl_tlt.errors import TLTError
from verl_tlt.vllm_worker.hybrid_states import keep_states_right, tell_prompts_by_more_than_their_shape

GPUModelRunner = pytest.importorskip("vllm.v1.worker.gpu_model_runner").GPUModelRunner


def config(hybrid=True, is_async=False, mode="none", drafts=True):
    return SimpleNamespace(
        speculative_config="eagle3" if drafts else None,
        model_config=SimpleNamespace(is_hybrid=hybrid),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
    )


V1 = {"drafter": "eagle", "_build_attention_metadata": "stock", "_update_states": "stock"}


@pytest.mark.parametrize(
    ("runner", "vllm", "said"),
    [
        ({"speculator": "eagle"}, config(), "V1 model runner"),
        (V1, config(is_async=True), "async_scheduling=False"),
        (V1, config(mode="align"), "without prefix caching only, not in the cache mode align"),
    ],
)
def test_what_is_not_exact_is_refused(runner, vllm, said):
    with pytest.raises(TLTError, match=said):
        keep_states_right(SimpleNamespace(**runner), vllm)


@pytest.mark.parametrize("left_alone", [{"hybrid": False}, {"drafts": False}])
def test_other_policies_and_engines_without_a_drafter_are_left_alone(left_alone):
    keep_states_right(runner := SimpleNamespace(**V1), config(is_async=True, mode="all", **left_alone))
    assert vars(runner) == V1


def test_a_prompt_as_long_as_a_verified_draft_takes_no_full_graph():
    """The second row is such a prompt; a dummy run says itself what it is."""
    rows = SimpleNamespace(num_tokens_no_spec=np.array([10, 4]), num_computed_tokens_cpu=np.array([9, 0]))
    runner = SimpleNamespace(
        input_batch=rows, _is_uniform_decode=GPUModelRunner._is_uniform_decode,
        _determine_batch_execution_and_padding=lambda **given: given.get("force_uniform_decode"),
    )  # fmt: skip
    assert tell_prompts_by_more_than_their_shape(runner), "else vLLM has caught up"
    determine = runner._determine_batch_execution_and_padding
    assert determine(num_reqs=1) is None and determine(num_reqs=2) is False
    assert determine(num_reqs=2, force_uniform_decode=True) is True
