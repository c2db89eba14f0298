"""Every vLLM symbol the rollout side relies on: an upgrade fails here with a list, not in a run with a stack trace."""

import dataclasses
import inspect

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (
            SchedulerOutput,
            "num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens num_spec_tokens_to_schedule",
        ),
        (ModelRunnerOutput, "req_id_to_index sampled_token_ids"),
        (DraftTokenIds, "req_ids draft_token_ids"),
    ],
)
def test_records_have_the_fields(record, names):
    assert set(names.split()) <= {field.name for field in dataclasses.fields(record)}


def test_engine_outputs_have_the_fields():
    assert {"request_id", "new_token_ids"} <= set(EngineCoreOutput.__struct_fields__)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (Scheduler.update_from_output, "self scheduler_output model_runner_output"),
        (Scheduler.update_draft_token_ids, "self draft_token_ids"),
        (Scheduler.shutdown, "self"),
        (SpecDecodeBaseProposer.propose, "self num_speculative_tokens"),
    ],
)
def test_functions_take_the_arguments(function, names):
    assert parameters(function)[: len(names.split())] == names.split()


def test_the_draft_length_is_looked_up_once_per_step_and_sent_to_the_workers():
    source = inspect.getsource(Scheduler.schedule)
    assert source.count("self.dynamic_sd_lookup[") == 1
    assert "num_spec_tokens_to_schedule=num_spec_tokens_to_schedule" in source
    assert "num_spec_tokens_to_schedule" in inspect.getsource(AsyncScheduler._update_after_schedule)


def test_admitted_requests_stand_at_the_end_of_running():
    source = inspect.getsource(Scheduler.schedule)
    assert source.count("self.running.append(request)") == 1
    assert "self.running.insert" not in source


@pytest.mark.parametrize(
    "name", ["num_computed_tokens", "num_tokens", "is_prefill_chunk", "request_id", "spec_token_ids"]
)
def test_requests_have_the_attributes(name):
    assert hasattr(Request, name) or f"self.{name}" in inspect.getsource(Request.__init__)


def test_the_proposer_is_called_by_keyword_and_hands_out_probabilities_once():
    source = inspect.getsource(GPUModelRunner.propose_draft_token_ids)
    assert "num_speculative_tokens=num_spec_tokens_to_schedule" in source
    assert "common_attn_metadata=common_attn_metadata" in source
    assert "self._last_draft_probs" in inspect.getsource(SpecDecodeBaseProposer.take_last_draft_probs)


def test_where_vllm_stops_drafting_is_where_we_expect_it():
    source = inspect.getsource(GPUModelRunner._input_fits_in_drafter)
    assert "max_seq_len + num_drafter_query_tokens" in source
    assert "<= self.effective_drafter_max_model_len" in source


def test_a_draft_without_its_probabilities_is_still_treated_as_certain():
    """The reason for dropping stale drafts in `TLTScheduler`; when this fails, see whether it is still needed."""
    assert "Missing cached draft probabilities" in inspect.getsource(GPUModelRunner._get_spec_decode_draft_probs)
