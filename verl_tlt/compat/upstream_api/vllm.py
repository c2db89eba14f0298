"""What verl-tlt relies on in vLLM."""

from __future__ import annotations

from verl_tlt.compat.upstream_api.symbol import Symbol

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

VLLM = (
    # Rollout, vLLM's side: a draft length chosen in every step.
    Symbol(
        f"{_SCHEDULER}.schedule",
        says=(
            "num_spec_tokens_to_schedule = self.dynamic_sd_lookup[",
            "num_spec_tokens_to_schedule=num_spec_tokens_to_schedule",
            "self.running.append(request)",
        ),
        used_by="engine_core/scheduler.py",
    ),
    Symbol(
        _SCHEDULER,
        has="dynamic_sd_lookup num_spec_tokens running requests finished_req_ids vllm_config max_model_len",
        used_by="engine_core/scheduler.py",
    ),
    Symbol(
        f"{_SCHEDULER}.update_from_output", "scheduler_output model_runner_output", used_by="engine_core/scheduler.py"
    ),
    Symbol(f"{_SCHEDULER}.update_draft_token_ids", "draft_token_ids", used_by="engine_core/scheduler.py"),
    Symbol(f"{_SCHEDULER}._free_request", "request", used_by="engine_core/scheduler.py"),
    Symbol("vllm.v1.request:Request", has="request_id num_output_tokens", used_by="engine_core/scheduler.py"),
    Symbol(f"{_SCHEDULER}.shutdown", used_by="engine_core/scheduler.py"),
    Symbol("vllm.v1.engine.core:EngineCore", has="scheduler", used_by="engine_core/scheduler.py"),
    Symbol(
        "vllm.v1.engine.core:EngineCore.post_step",
        "model_executed",
        says=("take_draft_token_ids()",),
        used_by="engine_core/scheduler.py",
    ),
    Symbol(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
        says=("num_spec_tokens_to_schedule",),
        used_by="engine_core/scheduler.py",
    ),
    Symbol(
        "vllm.v1.core.sched.output:SchedulerOutput",
        has="num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens num_spec_tokens_to_schedule",
        used_by="engine_core/scheduler.py",
    ),
    Symbol(
        "vllm.v1.outputs:ModelRunnerOutput", has="req_id_to_index sampled_token_ids", used_by="engine_core/scheduler.py"
    ),
    Symbol("vllm.v1.outputs:DraftTokenIds", has="req_ids draft_token_ids", used_by="engine_core/scheduler.py"),
    Symbol("vllm.v1.engine:EngineCoreOutput", has="request_id new_token_ids", used_by="engine_core/scheduler.py"),
    Symbol(
        "vllm.v1.request:Request",
        has="request_id num_computed_tokens num_tokens is_prefill_chunk spec_token_ids",
        used_by="speculation/decode_load.py",
    ),
    # The boundary of `min_tokens`.
    Symbol(
        "vllm.v1.request:Request",
        has="sampling_params status num_output_tokens num_output_placeholders is_finished",
        used_by="speculation/decode_load.py",
    ),
    Symbol("vllm.v1.request:RequestStatus", has="PREEMPTED", used_by="speculation/decode_load.py"),
    Symbol(
        "vllm.sampling_params:SamplingParams",
        has="min_tokens all_stop_token_ids",
        used_by="speculation/decode_load.py",
    ),
    Symbol(
        "vllm.config.speculative:SpeculativeConfig",
        has="method model num_speculative_tokens draft_sample_method draft_load_config draft_model_config",
        used_by="server/engine_arguments.py",
    ),
    Symbol(
        "vllm.config.scheduler:SchedulerConfig",
        has="scheduler_cls async_scheduling",
        used_by="server/engine_arguments.py",
    ),
    Symbol(
        "vllm.config.parallel:ParallelConfig",
        has="data_parallel_size tensor_parallel_size worker_extension_cls",
        used_by="engine_core/scheduler.py",
    ),
    Symbol(
        "vllm.config.vllm:VllmConfig", has="additional_config speculative_config", used_by="engine_core/scheduler.py"
    ),
    Symbol("vllm.envs:", says=("VLLM_USE_V2_MODEL_RUNNER",), used_by="server/engine_arguments.py"),
    Symbol("vllm.platforms.interface:Platform.is_cpu", used_by="server/engine_arguments.py"),
    # The drafter inside the worker.
    Symbol(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose",
        "num_speculative_tokens",
        used_by="vllm_worker/drafter_pass.py",
    ),
    Symbol(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
        has="model take_last_draft_probs _last_draft_probs num_speculative_tokens device",
        used_by="vllm_worker/drafter_pass.py",
    ),
    Symbol(f"{_RUNNER}.get_model", used_by="vllm_worker/live_drafter.py"),
    Symbol(_RUNNER, has="drafter use_async_scheduling input_batch", used_by="vllm_worker/drafter_pass.py"),
    Symbol(
        f"{_RUNNER}.propose_draft_token_ids",
        "scheduler_output",
        says=("num_speculative_tokens=num_spec_tokens_to_schedule", "common_attn_metadata=common_attn_metadata"),
        used_by="vllm_worker/drafter_pass.py",
    ),
    Symbol(
        f"{_RUNNER}._input_fits_in_drafter",
        says=("<= self.effective_drafter_max_model_len",),
        used_by="engine_core/scheduler.py",
    ),
    Symbol(
        f"{_RUNNER}._get_spec_decode_draft_probs",
        "spec_decode_metadata",
        says=("Missing cached draft probabilities", "self.input_batch.req_ids, spec_decode_metadata.num_draft_tokens"),
        used_by="vllm_worker/draft_probabilities.py",
    ),
    Symbol(f"{_RUNNER}.execute_model", "scheduler_output", used_by="vllm_worker/draft_probabilities.py"),
    # Drafts without probabilities.
    Symbol(
        f"{_RUNNER}._get_spec_decode_draft_probs",
        "spec_decode_metadata",
        says=("return torch.cat(draft_probs_rows, dim=0)",),
        used_by="vllm_worker/draft_probabilities.py",
    ),
    Symbol(f"{_RUNNER}.sample_tokens", used_by="vllm_worker/draft_probabilities.py"),
    Symbol(
        "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput",
        has="_model_runner_output",
        used_by="vllm_worker/draft_probabilities.py",
    ),
    Symbol(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
        has="_draft_attn_layer_names",
        used_by="vllm_worker/draft_probabilities.py",
    ),
    Symbol(
        "vllm.config.compilation:CompilationConfig",
        has="static_forward_context",
        used_by="vllm_worker/draft_probabilities.py",
    ),
    # n-grams alone: a proposer of our own, through vLLM's extension point.
    Symbol(
        f"{_RUNNER}.propose_draft_token_ids",
        says=('spec_config.method == "custom_class"',),
        used_by="vllm_worker/drafter_pass.py",
    ),
    Symbol(
        "vllm.v1.core.sched.output:SchedulerOutput",
        has="finished_req_ids scheduled_new_reqs scheduled_spec_decode_tokens",
        used_by="engine_core/ngram_drafts.py",
    ),
    Symbol(
        "vllm.v1.core.sched.output:NewRequestData", has="req_id prompt_token_ids", used_by="engine_core/ngram_drafts.py"
    ),
    # CUDA graphs for every arm.
    Symbol(
        _RUNNER,
        has="cudagraph_dispatcher uniform_decode_query_len",
        says=("max_query_len = self.uniform_decode_query_len if uniform_decode else num_tokens",),
        used_by="speculation/graph_rules.py",
    ),
    Symbol(f"{_RUNNER}._warmup_and_capture", "desc", used_by="speculation/graph_rules.py"),
    Symbol(
        f"{_RUNNER}._determine_batch_execution_and_padding",
        "num_tokens num_reqs num_scheduled_tokens_np max_num_scheduled_tokens",
        says=("uniform_decode_query_len=self.uniform_decode_query_len",),
        used_by="speculation/graph_rules.py",
    ),
    Symbol(
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher",
        has="uniform_decode_query_len vllm_config compilation_config _get_lora_cases add_cudagraph_key",
        used_by="speculation/graph_rules.py",
    ),
    Symbol(
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher._create_padded_batch_descriptor",
        "num_tokens uniform_decode has_lora num_active_loras",
        used_by="speculation/graph_rules.py",
    ),
    Symbol("vllm.config:", has="set_current_vllm_config", used_by="vllm_worker/live_drafter.py"),
    Symbol("vllm.distributed.parallel_state:get_tensor_model_parallel_rank", used_by="vllm_worker/live_drafter.py"),
    Symbol(
        "vllm.distributed.communication_op:tensor_model_parallel_all_reduce",
        "input_",
        used_by="vllm_worker/live_drafter.py",
    ),
    # The engine from outside.
    Symbol(
        "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async", "method", used_by="server/scheduler_client.py"
    ),
    Symbol(
        "vllm.v1.engine.core:EngineCoreProc",
        says=("getattr(self, method_name)",),
        used_by="server/scheduler_client.py",
    ),
    Symbol(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "prompt sampling_params request_id",
        used_by="server/calibration.py",
    ),
    Symbol("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc", "method timeout args", used_by="server/server.py"),
    Symbol("vllm.v1.engine.async_llm:AsyncLLM", has="reset_prefix_cache output_processor", used_by="server/server.py"),
    Symbol("vllm.v1.engine.async_llm:AsyncLLM.sleep", "level", used_by="server/server.py"),
    Symbol(
        "vllm.v1.engine.llm_engine:LLMEngine",
        has="from_engine_args add_request step has_unfinished_requests get_metrics",
        used_by="warmup/engine.py",
    ),
    Symbol("vllm.v1.engine.output_processor:OutputProcessor", has="request_states", used_by="server/server.py"),
    Symbol(
        "vllm.sampling_params:SamplingParams",
        has="temperature max_tokens ignore_eos detokenize",
        used_by="server/calibration.py",
    ),
)
