"""What a vLLM release runs drafts with, and how large a step may be with CUDA graphs."""

from types import SimpleNamespace

import pytest
import transformers
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from verl_tlt.speculation import graph_rules


@pytest.mark.parametrize(("release", "runner"), [((0, 24), "V1"), ((0, 31), "V1"), ((0, 32), "V2"), ((1, 0), "V2")])
def test_the_runner_is_one_that_drafts_what_it_is_asked_for(monkeypatch, release, runner):
    assert graph_rules.runner_for(release) == runner
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert graph_rules.runner_for(release) == "V1", "vLLM would give up FULL graphs for a table of draft lengths"


@pytest.mark.parametrize(
    ("name", "hybrid"),
    [("Qwen3", False), ("Gemma3", False), ("DeepseekV3", False), ("Qwen3Next", True), ("Jamba", True)],
)
def test_a_policy_is_hybrid_or_not_by_its_config(name, hybrid):
    assert graph_rules.is_hybrid(getattr(transformers, f"{name}Config")().to_dict()) == hybrid


def test_a_policy_is_hybrid_by_the_fields_that_it_was_published_with():
    published = {"model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_key_heads": 16}
    assert graph_rules.is_hybrid(published) and graph_rules.is_hybrid({"text_config": published})
    assert not graph_rules.is_hybrid({"model_type": "deepseek_v3", "kv_lora_rank": 512})


@pytest.mark.parametrize("most", [1, 2, 3, 4, 64])
def test_the_table_holds_every_arm_that_there_are_batches_for(most):
    table = graph_rules.draft_length_table(graph_rules.GRAPH_LENGTHS, most)
    by_batch = build_dynamic_sd_schedule_lookup(table, most, graph_rules.GRAPH_LENGTHS[-1])[1:]
    assert by_batch[-1] == graph_rules.GRAPH_LENGTHS[-1]
    assert len(set(by_batch)) == min(most, len(graph_rules.GRAPH_LENGTHS))
    assert graph_rules.draft_length_table((2,), most) == [[1, most, 2]]


def test_a_step_without_a_graph_verifies_what_vllm_has_memory_for():
    assert [graph_rules.row_limit(False, n) for n in (16, 256, 1024)] == [512, 512, 2048]
    assert graph_rules.row_limit(True, 1024) == 0


def test_the_limit_is_that_of_the_resolved_config():
    def limit(eager=False, mode="FULL_AND_PIECEWISE", largest=510):
        compilation = SimpleNamespace(max_cudagraph_capture_size=largest, cudagraph_mode=SimpleNamespace(name=mode))
        model = SimpleNamespace(enforce_eager=eager)
        named = {"compilation_config": compilation, "model_config": model, "num_speculative_tokens": 3}
        return graph_rules.token_limit(SimpleNamespace(**named))

    assert limit() == 508
    assert limit(eager=True) == limit(mode="NONE") == limit(largest=None) == 0
