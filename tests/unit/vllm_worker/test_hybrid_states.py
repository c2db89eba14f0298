"""An engine in which a hybrid policy would decode wrong tokens does not start with a drafter."""

from types import SimpleNamespace

import pytest

from verl_tlt.errors import TLTError
from verl_tlt.vllm_worker.hybrid_states import keep_states_right

pytest.importorskip("vllm")


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
