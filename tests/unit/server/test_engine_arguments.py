from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.server import engine_arguments
from verl_tlt.server.engine_arguments import engine_environment, engine_kwargs, engine_lengths, graph_mode, problems

EAGER, GRAPHS = (SimpleNamespace(enforce_eager=eager, max_num_seqs=64) for eager in (True, False))


WORKER = "verl_tlt.vllm_worker"
SPECULATIVE = {
    "method": "eagle3", "model": "/drafter", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic",
    "draft_load_config": {"load_format": "auto"},
}  # fmt: skip
ADAPTIVE = {"enable_adaptive_verification": True}
"""From vLLM 0.30 to 0.32 it changes what is sampled: its budget reads confidences of the step before, which know the
noise of a position that is drafted again. Commit 748ae15a computed it for every outcome of a small policy, in
test_vllm_adaptive_verification.py.
"""


def tlt(**speculation):
    return TLTConfig.from_dict({"speculation": speculation})


def kwargs(config=None, rollout=EAGER, user=None, on_cpu=True, **more):
    return engine_kwargs(config or tlt(), "/drafter", rollout, user or {}, on_cpu=on_cpu, **more)


@pytest.fixture
def vllm_is(monkeypatch):
    """Have another release of vLLM be the installed one."""
    return lambda version: monkeypatch.setattr(engine_arguments, "installed", lambda _: version)


@pytest.mark.parametrize(
    ("speculation", "mode", "arms"),
    [
        ({"max_draft_length": 5}, "PIECEWISE", (0, 1, 2, 3, 4, 5)),  # each by its count of tokens
        ({"max_draft_length": 7}, "FULL_DECODE_ONLY", (0, 1, 3, 7)),
        ({"max_draft_length": 5}, "FULL", (0, 1, 3)),
    ],
)
def test_arms_are_those_that_have_graphs(speculation, mode, arms):
    assert engine_lengths(tlt(**speculation), mode) == arms


@pytest.mark.parametrize(
    ("user", "mode"),
    [
        ({}, "FULL_AND_PIECEWISE"),
        ({"compilation_config": {"cudagraph_mode": "full_decode_only"}}, "FULL_DECODE_ONLY"),
        ({"compilation_config": '{"cudagraph_mode": "NONE"}'}, "NONE"),
        ({"compilation_config": {"cudagraph_capture_sizes": [8]}}, "FULL_AND_PIECEWISE"),
        ({"decode_context_parallel_size": 2}, "PIECEWISE"),
        ({"attention_backend": "FLASHINFER"}, "PIECEWISE"),
        ({"attention_config": {"backend": "FLASHINFER", "use_trtllm_attention": True}}, "FULL_AND_PIECEWISE"),
    ],
)
def test_graphs_are_those_that_verl_asks_for_and_vllm_can_capture(user, mode):
    assert graph_mode(user, enforce_eager=False) == mode
    assert graph_mode(user, enforce_eager=True) == "NONE"


@pytest.mark.parametrize(
    ("key", "value"),
    [*(("compilation_config", value) for value in ("{not json", "[1]", 3)), ("additional_config", "mine")],
)
def test_an_argument_that_is_no_mapping_is_named(key, value):
    with pytest.raises(TLTConfigError, match=rf"vllm\.{key} must be a mapping or its JSON"):
        list(problems(tlt(), {key: value}, enforce_eager=False))


def test_the_v2_runner_is_told_every_arm_and_no_other_runner_is(vllm_is):
    def table(version, rollout=GRAPHS, **speculation):
        vllm_is(version)
        config = tlt(max_draft_length=7, **speculation)
        return kwargs(config, rollout, on_cpu=False)["speculative_config"].get("num_speculative_tokens_per_batch_size")

    assert table("0.32.0") == table("0.33.0") == [[1, 1, 0], [2, 2, 1], [3, 3, 3], [4, 64, 7]]
    assert table("0.31.0") is None, "V1 would capture no FULL graphs at all"
    assert table("0.33.0", EAGER) is None


def test_the_engine_drafts_sampled_tokens_no_longer_than_its_longest_arm():
    assert kwargs(tlt(max_draft_length=5), GRAPHS)["speculative_config"] == SPECULATIVE


def test_vllms_own_enforce_eager_wins_unless_it_is_null():
    for rollout, own, lengths in ((GRAPHS, True, [0, 1, 2, 3]), (GRAPHS, None, [0, 1, 3]), (EAGER, None, [0, 1, 2, 3])):
        made = kwargs(tlt(), rollout, user={"enforce_eager": own})
        assert made["additional_config"]["tlt"]["arms"] == lengths


def test_settings_reach_the_scheduler_beside_the_users_own():
    ours = kwargs(tlt(policy="fixed", fixed=2), user={"additional_config": '{"mine": 1}'})
    config = ours["additional_config"]
    assert config["mine"] == 1 and config["tlt"]["arms"] == [0, 1, 2, 3]
    assert config["tlt"]["speculation"]["fixed"] == 2


@pytest.mark.parametrize(
    ("user", "on_cpu", "is_async"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"async_scheduling": True}, True, False),
        ({"async_scheduling": False}, False, False),
        ({"distributed_executor_backend": "ray"}, False, False),
        ({"distributed_executor_backend": "uni"}, False, True),
    ],
)
def test_the_scheduler_base_is_the_one_vllm_will_use(user, on_cpu, is_async):
    ours = kwargs(user=user, on_cpu=on_cpu)
    assert ours["async_scheduling"] is is_async
    assert ours["scheduler_cls"].endswith(".TLTAsyncScheduler" if is_async else ".TLTScheduler")


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        ({"logits_processors": ["a:B"]}, "vllm.logits_processors cannot be used with a drafter"),
        ({"reasoning_config": {"reasoning_start_str": "<t>"}}, "vllm.reasoning_config is for thinking_token_budget"),
        ({"return_sampling_mask": True}, "vllm.return_sampling_mask cannot be used with a drafter"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, "vllm.kv_transfer_config"),
        ({"speculative_config": ADAPTIVE}, "vllm.speculative_config is set by verl-tlt itself"),
        ({"config": "vllm.yaml"}, "vllm.config hides arguments from verl-tlt"),
        ({"speculative-config": ADAPTIVE}, "vllm.speculative-config hides arguments from verl-tlt"),
        ({"speculative_config.enable_adaptive_verification": True}, "hides arguments from verl-tlt; write each as a"),
    ],
)
def test_what_cannot_run_with_a_drafter_is_refused_by_its_key(user, sentence):
    with pytest.raises(TLTConfigError, match=sentence):
        kwargs(user=user)


def test_an_installed_logits_processor_is_refused(monkeypatch):
    """vLLM loads those of no package where it speculates, and samples otherwise than without drafts."""
    plugin = EntryPoint("mine", "mine.processors:Mine", "vllm.logits_processors")
    monkeypatch.setattr(engine_arguments, "entry_points", lambda group: [plugin] if group == plugin.group else [])
    with pytest.raises(TLTConfigError, match=r"installed logits processor mine\.processors:Mine .*: uninstall it"):
        kwargs()


@pytest.mark.parametrize(
    ("method", "source", "speculative"),
    [
        ("eagle3", "ngram", {"method": "custom_class", "model": f"{WORKER}.drafter_pass.NoProposals"}),
        ("mtp", "eagle", {k: v for k, v in SPECULATIVE.items() if k != "model"} | {"method": "mtp"}),
    ],
)
def test_ngrams_and_mtp_heads_draft_on_v1_alone_and_what_passes_the_scheduler_is_synchronous(
    vllm_is, method, source, speculative
):
    vllm_is("0.31.0")
    config = TLTConfig.from_dict({"drafter": {"method": method}, "speculation": {"source": source}})
    ours = kwargs(config, GRAPHS, on_cpu=False)
    assert ours["speculative_config"] == {**speculative, "num_speculative_tokens": 3}
    assert ours["async_scheduling"] == (source == "eagle")
    assert ours["scheduler_cls"].endswith(".TLTAsyncScheduler" if source == "eagle" else ".TLTScheduler")
    assert engine_environment() == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    if source != "eagle":
        with pytest.raises(TLTConfigError, match=f"async_scheduling=True is not possible .*source={source}"):
            kwargs(config, user={"async_scheduling": True}, on_cpu=False)
    vllm_is("0.32.0")
    what = "source=ngram" if source == "ngram" else "method=mtp"
    with pytest.raises(
        TLTConfigError, match=rf"{what} does not speculate with vLLM 0\.32\.0: install vLLM 0\.24 to 0\.31"
    ):
        kwargs(config, GRAPHS, on_cpu=False)
    assert engine_environment() == {}


def test_ngrams_alone_need_no_mtp_head():
    with pytest.raises(TLTConfigError, match=r"source=ngram drafts without a head: remove it, or tlt\.drafter\.method"):
        kwargs(TLTConfig.from_dict({"drafter": {"method": "mtp"}, "speculation": {"source": "ngram"}}))


def test_a_hybrid_policys_engine_schedules_synchronously_and_caches_no_prefixes():
    ours = kwargs(user={"enable_prefix_caching": True}, on_cpu=False, hybrid=True)
    assert ours["async_scheduling"] is ours["enable_prefix_caching"] is False
    assert ours["scheduler_cls"].endswith(".TLTScheduler")
    assert "enable_prefix_caching" not in kwargs(on_cpu=False)


@pytest.mark.parametrize(
    ("version", "speculation", "user", "said"),
    [
        ("0.32.0", {}, {}, "hybrid policy .* does not speculate with vLLM 0.32.0"),
        ("0.31.0", {"source": "ngram"}, {}, "source=ngram was not tested with a hybrid policy"),
        ("0.24.0", {}, {"async_scheduling": True}, "async_scheduling=True is not possible with a hybrid policy"),
    ],
)
def test_what_was_not_tested_with_a_hybrid_policy_is_refused(vllm_is, version, speculation, user, said):
    vllm_is(version)
    with pytest.raises(TLTConfigError, match=said):
        kwargs(tlt(**speculation), user=user, on_cpu=False, hybrid=True)
    assert kwargs(tlt(**speculation), on_cpu=False)


def test_an_old_vllm_and_a_fixed_length_without_an_arm_are_refused(vllm_is):
    with pytest.raises(TLTConfigError, match=r"fixed=2 is none of the engine's draft lengths \[0, 1, 3\]"):
        kwargs(tlt(policy="fixed", fixed=2), GRAPHS)
    vllm_is("0.23.2")
    with pytest.raises(TLTConfigError, match=r"vLLM 0\.23\.2 cannot change the draft length per step: install 0\.24"):
        kwargs()
