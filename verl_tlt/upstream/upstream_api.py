"""Every symbol of verl and vLLM that verl-tlt touches, by our file that does, with the signature it relies on.

A release number says little about a function that begins with an underscore. So what is used is listed here,
`upstream.sources` looks it up in a release's source text, and a test compares the list with our imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Symbol:
    """Something of verl's or vLLM's that our code calls, overrides, replaces or reads."""

    name: str  # `module:qualified.name`; for a module itself, `module:`
    takes: str = ""
    """Names of the first parameters, in order, `self` left out; space-separated like the next one."""
    has: str = ""  # names that the class or module must define; its bases within the package count
    says: tuple[str, ...] = ()  # fragments that its source must contain, where we rely on how it is written
    moved_to: str = ""  # where a later release defines it, if it is not handed on to the module in `name`
    used_by: str = ""  # our file, below the package that lists it (`by_file`)

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


def by_file(users: Mapping[str, Sequence[Symbol]]) -> tuple[Symbol, ...]:
    """The symbols of a list by file, each with that file as its `used_by`."""
    return tuple(replace(symbol, used_by=file) for file, symbols in users.items() for symbol in symbols)


_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
_BALANCER = "verl.workers.rollout.router:GlobalRequestLoadBalancer"
_BALANCER_NEXT = "verl.workers.rollout.router.global_balancer"  # where the router is a package: verl's next release

VERL = {
    "plugin.py": (
        Symbol("verl.utils.config:validate_config", "config use_reference_policy use_critic"),
        Symbol("verl.trainer.main_ppo:", has="validate_config"),
        Symbol("verl.trainer.ppo.v1.trainer_base:get_trainer_cls", "name"),
    ),
    "trainer/mixin.py": (
        Symbol("verl.trainer.ppo.v1.trainer_base:register_trainer", "name"),
        Symbol("verl.trainer.ppo.v1.trainer_base:", has="TRAINER_REGISTRY"),
        Symbol("verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync"),
        Symbol("verl.trainer.ppo.v1.trainer_colocate_async:PPOTrainerColocateAsync"),
        Symbol(
            "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync",
            has="standalone_server_manager current_mode _setup",
        ),
        Symbol("verl.trainer.ppo.v1.trainer_separate_async:", has="logger"),
        Symbol("verl.trainer.ppo.v1.trainer_separate_async:HybridEngineMode", has="ROLLOUT"),
        Symbol("verl.workers.rollout.llm_server:LLMServerManager.get_client", "client_cls"),
        Symbol(
            "verl.trainer.ppo.v1.trainer_colocate_async:PPOTrainerColocateAsync.on_sample_end",
            says=("abort_replicas()", "sleep_replicas()"),
        ),
        Symbol(
            _TRAINER,
            has="_setup _init_resource_pool_mgr get_llm_client on_init_end on_sample_begin on_sample_end on_step_end "
            "on_validate_end _save_checkpoint config global_steps actor_rollout_wg llm_server_manager replay_buffer "
            "resource_pool_manager role_worker_mapping local_trigger_step parameter_sync_step checkpoint_manager "
            "total_training_steps use_critic critic_wg",
        ),
        Symbol(f"{_TRAINER}._add_prompts_to_generate", "num_prompts"),
        Symbol(f"{_TRAINER}._build_replay_buffer", says=("refill_fn=self._add_prompts",)),
        Symbol(f"{_TRAINER}.__init__", "config"),
        Symbol(f"{_TRAINER}.fit", "agent_loop_manager"),
        Symbol(f"{_TRAINER}._compute_reward_colocate", "batch metrics"),
        Symbol(f"{_TRAINER}._balance_batch", "batch metrics"),
        Symbol(f"{_TRAINER}._step_once", says=("batch = self._balance_batch(batch, metrics=metrics)",)),
        Symbol(f"{_TRAINER}._compute_old_log_prob", "batch metrics"),
        Symbol(f"{_TRAINER}._update_actor", "batch metrics"),
        Symbol(f"{_TRAINER}._compute_metrics", "batch metrics timing_raw"),
        Symbol("verl.trainer.ppo.utils:Role", has="ActorRollout ActorRolloutRef Actor"),
        Symbol("verl.workers.rollout.replica:RolloutReplicaRegistry.register", "name loader"),
    ),
    "trainer/run_setup.py": (
        Symbol("verl.utils.fs:copy_to_local", "src"),
        Symbol("verl.utils.checkpoint.checkpoint_manager:find_latest_ckpt_path", "path"),
    ),
    "trainer/checkpoints.py": (
        # The drafter is written after these two, before the step is named, and goes when the policy's directory does.
        Symbol(
            f"{_TRAINER}._save_checkpoint",
            says=(
                'os.path.join(local_global_step_folder, "actor")',
                "self.actor_rollout_wg.save_checkpoint(",
                "self.critic_wg.save_checkpoint(",
                '"latest_checkpointed_iteration.txt"',
            ),
        ),
    ),
    "trainer/watch.py": (
        Symbol(
            "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer",
            has="filter_groups_metric sync_refill_failed_groups finished_keys pending_keys running_keys",
        ),
        Symbol(
            "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._sync_metadata_from_transfer_queue",
            says=("self.pending_keys.clear()", "tq.kv_list()"),
        ),
    ),
    "trainer/spot_workers.py": (
        Symbol("verl.single_controller.ray.base:RayResourcePool", has="get_placement_groups max_colocate_count"),
        Symbol("verl.plugin.platform.platform_manager:get_platform"),
        Symbol("verl.plugin.platform.platform_base:PlatformBase.ray_resource_options", "num_gpus"),
    ),
    "trainer/servers.py": (
        Symbol(
            "verl.workers.rollout.replica:RolloutReplica",
            has="servers _server_address _server_handle is_reward_model is_teacher_model",
        ),
        Symbol("verl.workers.rollout.llm_server:LLMServerManager", has="get_client get_replicas global_load_balancer"),
        Symbol(f"{_BALANCER}.get_status", says=('"servers": ', "_inflight_requests"), moved_to=_BALANCER_NEXT),
        Symbol(f"{_BALANCER}.remove_servers", "server_ids", moved_to=_BALANCER_NEXT),
        Symbol(f"{_BALANCER}.add_servers", "servers", moved_to=_BALANCER_NEXT),
    ),
    "server/client.py": (
        Symbol("verl.workers.rollout.llm_server:LLMServerClient.generate", "request_id"),
        Symbol(
            "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate",
            "request_id",
            says=("await super().generate(", 'output.stop_reason not in ("aborted", "abort")'),
        ),
    ),
    "server/server.py": (
        Symbol(
            _SERVER,
            has="_preprocess_engine_kwargs _get_worker_extension_cls clear_kv_cache sleep open_submission_gate config "
            "model_config engine node_rank nnodes replica_rank _submission_paused _rejecting _resume_event _admitting "
            "_server_task",
        ),
        Symbol(f"{_SERVER}.launch_server", "master_address master_port dp_rpc_port"),
        Symbol(f"{_SERVER}._post_init", "cuda_visible_devices"),
        Symbol(f"{_SERVER}._preprocess_engine_kwargs", "engine_kwargs"),
        Symbol(f"{_SERVER}.wake_up", "tags"),
        Symbol(f"{_SERVER}.abort_all_requests", "reset_prefix_cache reject_request"),
        Symbol("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica", has="server_class"),
        Symbol("verl.workers.config.rollout:RolloutConfig", has="mtp"),
        Symbol("verl.workers.config.model:MtpConfig", has="enable enable_train enable_rollout"),
        # Sleep keeps the MTP head that verl trains, and each sync writes it.
        Symbol(f"{_SERVER}._resolve_sleep_level", says=("mtp_rollout_enabled",)),
        Symbol(f"{_SERVER}.launch_server", says=("build_mtp_speculative_config(",)),
        Symbol(
            "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension._use_mtp_drafter_weight_sync",
            says=('spec.method == "mtp"',),
        ),
    ),
    "server/launch.py": (
        Symbol(
            _SERVER,
            has="_init_config _init_model_config _validate_configs _should_profile _preprocess_engine_kwargs config "
            "_get_worker_extension_cls model_config nnodes node_rank replica_rank _disaggregation_role",
        ),
        Symbol(f"{_SERVER}.launch_server", says=("self._preprocess_engine_kwargs(", "await self.run_server(")),
        Symbol(f"{_SERVER}.run_server", "args", says=("from_cli_args(args)", 'method="monkey_patch_model"')),
        Symbol("verl.workers.rollout.utils:get_vision_placeholder_token_ids", "processor"),
    ),
    "vllm_worker/extension.py": (Symbol("verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension"),),
    "actor/worker.py": (
        Symbol("verl.workers.engine_workers:ActorRolloutRefWorker", has="actor_worker_cls actor"),
        Symbol("verl.workers.engine_workers:ActorRolloutRefWorker.update_weights", "global_steps mode"),
        Symbol("verl.experimental.separation.engine_workers:DetachActorWorker"),
        Symbol("verl.workers.engine_workers:TrainingWorker.infer_batch", "data"),
        Symbol("verl.single_controller.base.decorator:register", "dispatch_mode"),
        Symbol("verl.utils.tensordict_utils:get", "tensordict key default"),
    ),
    "actor/adapters.py": (
        Symbol(
            "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.forward_step",
            "micro_batch loss_function forward_only",
        ),
        Symbol(
            "verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
            has="get_per_tensor_param get_data_parallel_rank use_ulysses_sp ulysses_parallel_group module "
            "engine_config model_config",
        ),
        Symbol(
            "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead.forward_step",
            "batch_iter model",
            says=("batch: TensorDict = next(batch_iter)",),
        ),
        Symbol(
            "verl.workers.engine.megatron.transformer_impl:MegatronEngine",
            has="get_per_tensor_param get_data_parallel_rank _get_context_parallel_layout module engine_config mode",
        ),
        Symbol("verl.utils.megatron_utils:unwrap_model", "model"),
        Symbol(
            "verl.workers.config.engine:McoreEngineConfig", has="strategy dynamic_context_parallel use_megatron_fsdp"
        ),
        Symbol("verl.models.mcore.util:preprocess_thd_engine", says=("cu_seqlens_q_padded=cu_seqlens_padded",)),
    ),
}

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

VLLM = {
    "engine_core/scheduler.py": (
        Symbol(
            f"{_SCHEDULER}.schedule",
            says=(
                "num_spec_tokens_to_schedule = self.dynamic_sd_lookup[",
                "num_spec_tokens_to_schedule=num_spec_tokens_to_schedule",
                "self.running.append(request)",
            ),
        ),
        Symbol(
            _SCHEDULER,
            has="dynamic_sd_lookup num_spec_tokens running requests finished_req_ids vllm_config max_model_len",
        ),
        Symbol(f"{_SCHEDULER}.update_from_output", "scheduler_output model_runner_output"),
        Symbol(f"{_SCHEDULER}.update_draft_token_ids", "draft_token_ids"),
        Symbol(f"{_SCHEDULER}.add_request", "request"),
        Symbol(f"{_SCHEDULER}._free_request", "request"),
        Symbol("vllm.v1.request:Request", has="request_id num_output_tokens sampling_params spec_token_ids"),
        Symbol(f"{_SCHEDULER}.shutdown"),
        Symbol("vllm.v1.engine.core:EngineCore", has="scheduler"),
        Symbol("vllm.v1.engine.core:EngineCore.post_step", "model_executed", says=("take_draft_token_ids()",)),
        Symbol(
            "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
            says=("num_spec_tokens_to_schedule",),
        ),
        Symbol(
            "vllm.v1.core.sched.output:SchedulerOutput",
            has="num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens "
            "num_spec_tokens_to_schedule has_structured_output_requests",
        ),
        Symbol("vllm.v1.outputs:ModelRunnerOutput", has="req_id_to_index sampled_token_ids"),
        Symbol("vllm.v1.outputs:DraftTokenIds", has="req_ids draft_token_ids"),
        Symbol("vllm.v1.engine:EngineCoreOutput", has="request_id new_token_ids"),
        Symbol(
            "vllm.config.parallel:ParallelConfig", has="data_parallel_size tensor_parallel_size worker_extension_cls"
        ),
        Symbol("vllm.config.vllm:VllmConfig", has="additional_config speculative_config"),
        Symbol(f"{_RUNNER}._input_fits_in_drafter", says=("<= self.effective_drafter_max_model_len",)),
    ),
    "engine_core/decode_load.py": (
        Symbol(
            "vllm.v1.request:Request",
            has="request_id num_computed_tokens num_tokens is_prefill_chunk spec_token_ids sampling_params status "
            "num_output_tokens num_output_placeholders is_finished",
        ),
        Symbol("vllm.v1.request:RequestStatus", has="PREEMPTED"),
        Symbol("vllm.sampling_params:SamplingParams", has="min_tokens all_stop_token_ids"),
    ),
    "server/engine_arguments.py": (
        Symbol(
            "vllm.config.speculative:SpeculativeConfig",
            has="method model num_speculative_tokens draft_sample_method draft_load_config draft_model_config",
        ),
        Symbol("vllm.config.scheduler:SchedulerConfig", has="scheduler_cls async_scheduling"),
        Symbol("vllm.config.speculative:SpeculativeConfig", has="num_speculative_tokens_per_batch_size"),
        Symbol("vllm.v1.engine.async_llm:AsyncLLM", has="vllm_config"),
        Symbol("vllm.envs:", says=("VLLM_USE_V2_MODEL_RUNNER",)),
        Symbol("vllm.platforms.interface:Platform.is_cpu"),
    ),
    "vllm_worker/cuda_graphs.py": (
        Symbol("vllm.v1.cudagraph_dispatcher:CudagraphDispatcher", has="cudagraph_keys"),
        Symbol("vllm.v1.worker.gpu.model_runner:GPUModelRunner", has="cudagraph_manager speculator"),
        Symbol("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager", has="graphs"),
        Symbol("vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor", has="cg_mode uniform_token_count"),
    ),
    "vllm_worker/drafter_pass.py": (
        Symbol("vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose", "num_speculative_tokens"),
        Symbol(
            "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
            has="model _last_draft_probs num_speculative_tokens device",
        ),
        Symbol(_RUNNER, has="drafter use_async_scheduling input_batch"),
        Symbol(
            f"{_RUNNER}.propose_draft_token_ids",
            "scheduler_output",
            says=(
                "num_speculative_tokens=num_spec_tokens_to_schedule",
                "common_attn_metadata=common_attn_metadata",
                'spec_config.method == "custom_class"',  # n-grams alone: a proposer of our own
            ),
        ),
    ),
    "vllm_worker/live_drafter.py": (
        Symbol(f"{_RUNNER}.get_model"),
        Symbol("vllm.config:", has="set_current_vllm_config"),
        Symbol("vllm.distributed.parallel_state:get_tensor_model_parallel_rank"),
        Symbol("vllm.distributed.communication_op:tensor_model_parallel_all_reduce", "input_"),
        Symbol("vllm.model_executor.models.mimo_mtp:MiMoMTP.load_weights", "weights", says=("mtp_layers",)),
        Symbol("vllm.model_executor.models.qwen3_5_mtp:Qwen3_5MTP.load_weights", "weights", says=('"mtp."',)),
    ),
    "vllm_worker/hybrid_states.py": (
        Symbol(
            f"{_RUNNER}._build_attention_metadata",
            says=(
                "if use_spec_decode and isinstance(",
                "num_decode_draft_tokens_cpu=self.num_decode_draft_tokens.cpu[",
            ),
        ),
        Symbol(
            f"{_RUNNER}.execute_model",
            says=("use_spec_decode=use_spec_decode", "num_scheduled_tokens=scheduler_output.num_scheduled_tokens"),
        ),
        Symbol(f"{_RUNNER}._update_states", "scheduler_output"),
        Symbol(_RUNNER, has="num_decode_draft_tokens num_accepted_tokens_event query_start_loc requests input_batch"),
        Symbol(
            "vllm.v1.worker.gpu_input_batch:InputBatch",
            has="num_accepted_tokens_cpu num_computed_tokens_cpu num_prompt_tokens req_id_to_index add_request",
        ),
        Symbol(
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
            says=("spec_sequence_masks_cpu = num_decode_draft_tokens_cpu >= 0",),
        ),
        Symbol("vllm.config.cache:CacheConfig", has="mamba_cache_mode"),
        Symbol("vllm.config.scheduler:SchedulerConfig", has="async_scheduling"),
        Symbol("vllm.v1.core.sched.output:SchedulerOutput", has="num_scheduled_tokens finished_req_ids"),
    ),
    "vllm_worker/draft_rows.py": (Symbol("vllm.triton_utils:", has="tl triton"),),
    "vllm_worker/draft_probabilities.py": (
        Symbol(
            f"{_RUNNER}._get_spec_decode_draft_probs",
            "spec_decode_metadata",
            says=(
                "Missing cached draft probabilities",
                "self.input_batch.req_ids, spec_decode_metadata.num_draft_tokens",
                "return torch.cat(draft_probs_rows, dim=0)",
            ),
        ),
        Symbol(f"{_RUNNER}.execute_model", "scheduler_output"),
        Symbol(f"{_RUNNER}.sample_tokens"),
        Symbol("vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput", has="_model_runner_output"),
        Symbol("vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer", has="_draft_attn_layer_names"),
        Symbol("vllm.config.compilation:CompilationConfig", has="static_forward_context"),
        Symbol("vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens", "grammar_output"),
        Symbol("vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample", says=("self.speculator.draft_logits,",)),
        Symbol(
            "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator",
            has="draft_attn_layer_names draft_logits",
        ),
        Symbol("vllm.v1.worker.gpu.input_batch:InputBatch", has="idx_mapping"),
        Symbol("vllm.v1.worker.gpu.async_utils:AsyncOutput", has="model_runner_output"),
    ),
    "engine_core/grammar_drafts.py": (
        Symbol(f"{_SCHEDULER}.update_draft_token_ids", says=("validate_tokens(",)),  # what cuts drafts
        Symbol(
            "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask",
            "requests structured_output_request_ids scheduled_spec_decode_tokens",
            says=("if token == -1:",),
        ),
        Symbol(f"{_SCHEDULER}.get_grammar_bitmask", says=("scheduler_output.scheduled_spec_decode_tokens",)),
        Symbol("vllm.v1.request:Request", has="structured_output_request spec_token_ids is_prefill_chunk"),
    ),
    "engine_core/ngram_drafts.py": (
        Symbol(
            "vllm.v1.core.sched.output:SchedulerOutput",
            has="finished_req_ids scheduled_new_reqs scheduled_spec_decode_tokens",
        ),
        Symbol("vllm.v1.core.sched.output:NewRequestData", has="req_id prompt_token_ids"),
    ),
    "server/engine_calls.py": (
        Symbol("vllm.v1.engine.core_client:AsyncMPClient.call_utility_async", "method"),
        Symbol("vllm.v1.engine.core:EngineCoreProc", says=("getattr(self, method_name)",)),
        Symbol("vllm.v1.engine.core_client:MPClient", has="resources utility_results"),
        Symbol("vllm.v1.engine.core_client:BackgroundResources", has="engine_dead"),
        Symbol(
            "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async",
            says=("self.utility_results[call_id] = future", "await self._send_input_message("),
        ),
        Symbol("vllm.v1.engine.core_client:AsyncMPClient._send_input_message", says=("self.ensure_alive()",)),
        Symbol("vllm.v1.engine.async_llm:AsyncLLM", has="engine_core errored"),
        Symbol("vllm.v1.engine.exceptions:EngineDeadError"),
    ),
    "server/calibration.py": (
        Symbol(
            "vllm.config.vllm:VllmConfig",
            has="model_config compilation_config lora_config cache_config parallel_config attention_config "
            "scheduler_config use_v2_model_runner",
        ),
        Symbol("vllm.config.model:ModelConfig", has="dtype enforce_eager quantization"),
        Symbol("vllm.config.compilation:CompilationConfig", has="mode cudagraph_mode"),
        Symbol("vllm.config.attention:AttentionConfig", has="backend"),
        Symbol("vllm.config.cache:CacheConfig", has="cache_dtype"),
        Symbol("vllm.config.lora:LoRAConfig", has="max_lora_rank"),
        Symbol("vllm.v1.engine.async_llm:AsyncLLM.generate", "prompt sampling_params request_id"),
        Symbol("vllm.sampling_params:SamplingParams", has="temperature max_tokens ignore_eos detokenize"),
    ),
    "server/stop_strings.py": (
        Symbol(
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            "engine_core_outputs engine_core_timestamp iteration_stats",
            says=("self.request_states.get(req_id)", "if req_state is None:"),  # what comes behind the end is dropped
        ),
        Symbol("vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update", "new_token_ids stop_terminated"),
        Symbol("vllm.v1.engine:EngineCoreOutput", has="request_id new_token_ids new_logprobs finish_reason"),
        Symbol("vllm.v1.outputs:LogprobsLists.slice_request", "req_idx num_positions"),
    ),
    "server/server.py": (
        Symbol("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc", "method timeout args"),
        Symbol("vllm.v1.engine.async_llm:AsyncLLM", has="reset_prefix_cache output_processor errored shutdown"),
        Symbol("vllm.v1.engine.async_llm:AsyncLLM.sleep", "level"),
        Symbol("vllm.v1.engine.output_processor:OutputProcessor", has="request_states"),
    ),
    "commands/warmup/engine.py": (Symbol("vllm.v1.metrics.reader:get_metrics_snapshot"),),
}

SYMBOLS = (*by_file(VERL), *by_file(VLLM))
"""Everything outside the documented interfaces."""
