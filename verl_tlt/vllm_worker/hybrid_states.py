"""The recurrent states of a hybrid policy (layers of linear attention between those of attention) while K changes.

Such a layer keeps a state instead of a KV cache: one after each token of a row's last draft, of which the next step
reads the one after the last token accepted. vLLM (V1 model runner, 0.24 to 0.31) reads the right one only if every row
has drafts in every step, and no step that computes a prompt has the shape of one that verifies drafts. On the CPU
backend verl_cpu makes a further change.

An exception in these changes is not contained: without them a row reads the state of another token, and its tokens are
wrong. It ends the engine, and with it the run, as an error of vLLM's own there does.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from verl_tlt.errors import TLTError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config.vllm import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def keep_states_right(runner: GPUModelRunner, vllm_config: VllmConfig) -> None:
    """Make these changes in the runner of a hybrid policy; a `TLTError` where they would not be enough.

    Nothing is changed for other policies, nor without a drafter: vLLM leaves an extension in its worker's class, so
    an engine that is started without one in the same process has it too. Call it between model load and graph capture.
    """
    if not vllm_config.model_config.is_hybrid or vllm_config.speculative_config is None:
        return
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder as Builder

    if hasattr(runner, "speculator"):
        raise TLTError("A hybrid policy is drafted for on vLLM's V1 model runner only: VLLM_USE_V2_MODEL_RUNNER=0.")
    if vllm_config.scheduler_config.async_scheduling:
        raise TLTError("A hybrid policy is drafted for with synchronous scheduling only: async_scheduling=False.")
    cache = vllm_config.cache_config
    mode = cache.mamba_cache_mode
    if mode != "none":
        raise TLTError(f"A hybrid policy is drafted for without prefix caching only, not in the cache mode {mode}.")
    if getattr(cache, "use_replayssm", False):
        raise TLTError("use_replayssm=True does not go with drafts for a hybrid policy: leave it out.")
    if "num_decode_draft_tokens_cpu >= 0" not in inspect.getsource(Builder.build):
        unknown = "verl-tlt does not know how this vLLM marks rows with drafts of a hybrid policy"
        raise TLTError(f"{unknown}: set tlt.speculation.enable=False.")
    count_rows_without_drafts(runner, Builder.build)
    remember_accepted(runner)
    tell_prompts_by_more_than_their_shape(runner)


# Changes vllm: patches/README.md#a-row-without-drafts-reads-the-recurrent-state-of-its-last-accepted-token
def count_rows_without_drafts(runner: GPUModelRunner, build: Callable[..., object]) -> bool:
    """Have a decode row without drafts count as one that is verified; returns whether vLLM, by `build`, needs it.

    Only the layers' path for verified rows reads the state at the offset of the last accepted token, and `build` takes
    that path only where a row has a draft. So rows without one are said to have one draft token; `build` uses the
    number for nothing else.
    """
    if "num_decode_draft_tokens_cpu[" not in inspect.getsource(build):
        return False
    build_metadata = runner._build_attention_metadata

    def build_attention_metadata(*args: object, **kwargs: Any) -> object:
        if kwargs.get("num_scheduled_tokens") is None:  # a dummy run
            return build_metadata(*args, **kwargs)
        batch = runner.input_batch
        rows = kwargs["num_reqs"]
        draft_tokens = runner.num_decode_draft_tokens.np
        if not kwargs["use_spec_decode"]:
            draft_tokens.fill(-1)  # vLLM fills it in only where a row has a draft
        scheduled = runner.query_start_loc.np[1 : rows + 1] - runner.query_start_loc.np[:rows]
        decodes = batch.num_computed_tokens_cpu[:rows] >= batch.num_prompt_tokens[:rows]
        draft_tokens[:rows][(scheduled == 1) & decodes] = 1
        return build_metadata(*args, **{**kwargs, "use_spec_decode": True})

    runner._build_attention_metadata = build_attention_metadata
    return True


# Changes vllm: patches/README.md#a-request-that-sat-out-steps-knows-how-many-tokens-its-last-one-accepted
def remember_accepted(runner: GPUModelRunner) -> bool:
    """Give a request that sat out steps the count of accepted tokens that it had before; returns whether vLLM needs it.

    vLLM sets the count to 1, which is right only for a request that is computed from its first token on.
    """
    from vllm.v1.worker.gpu_input_batch import InputBatch

    if "self.num_accepted_tokens_cpu[req_index] = 1" not in inspect.getsource(InputBatch.add_request):
        return False
    update = runner._update_states
    accepted_of: dict[str, int] = {}  # by request that sits out steps

    def update_states(output: SchedulerOutput) -> object:
        batch = runner.input_batch
        scheduled = output.num_scheduled_tokens
        leaving = batch.req_id_to_index.keys() - scheduled.keys()
        if leaving:
            runner.num_accepted_tokens_event.synchronize()
            for request in leaving:
                row = batch.req_id_to_index[request]
                accepted_of[request] = int(batch.num_accepted_tokens_cpu[row])
        for request in output.finished_req_ids:
            accepted_of.pop(request, None)
        result = update(output)
        for request in accepted_of.keys() & scheduled.keys():
            accepted = accepted_of.pop(request)
            if runner.requests[request].num_computed_tokens > 0:  # else it was preempted
                row = runner.input_batch.req_id_to_index[request]
                runner.input_batch.num_accepted_tokens_cpu[row] = accepted
        return result

    runner._update_states = update_states
    return True


# Changes vllm: patches/README.md#a-step-that-computes-a-prompt-does-not-count-as-one-that-verifies-drafts
def tell_prompts_by_more_than_their_shape(runner: GPUModelRunner) -> bool:
    """Have a step with a row of a prompt run without a FULL CUDA graph; returns whether vLLM needs it.

    vLLM takes any step with `1 + K` tokens in each row for one that verifies drafts, also a prompt of so many tokens or
    the last part of one. Its graph would then read the states and counts of an earlier step.
    """
    if "num_tokens == max_num_scheduled_tokens * num_reqs" not in inspect.getsource(runner._is_uniform_decode):
        return False
    determine = runner._determine_batch_execution_and_padding

    def determine_batch_execution(*args: object, **kwargs: Any) -> object:
        if "force_uniform_decode" not in kwargs:  # else a dummy run
            batch = runner.input_batch
            rows = kwargs["num_reqs"]
            to_compute = batch.num_tokens_no_spec[:rows] - batch.num_computed_tokens_cpu[:rows]
            if (to_compute > 1).any():  # in a row that decodes it is only the token that was sampled last
                kwargs["force_uniform_decode"] = False
        return determine(*args, **kwargs)

    runner._determine_batch_execution_and_padding = determine_batch_execution
    return True
