"""Every symbol of verl and vLLM that verl-tlt touches, with the signature it relies on.

A release number says little about a function that begins with an underscore. So what is used is listed here;
`verl_tlt.compat.sources` looks it up in a release's source text.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symbol:
    """Something of verl's or vLLM's that our code calls, overrides, replaces or reads."""

    name: str
    """`module:qualified.name`; for a module itself, `module:`."""
    takes: str = ""
    """Names of the first parameters, in order, `self` left out; space-separated like the next one."""
    has: str = ""
    """Names that the class or module must define; its bases within the package count."""
    says: tuple[str, ...] = ()
    """Fragments that its source must contain, where we rely on how it is written."""
    used_by: str = ""
    """Our file, below `verl_tlt/`."""
    cpu_only: bool = False
    """Needed on machines without an accelerator alone."""

    @property
    def package(self) -> str:
        """verl or vllm."""
        return self.name.partition(".")[0]


_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

SYMBOLS = (
    # How a run becomes a TLT run.
    Symbol("verl.utils.config:validate_config", "config use_reference_policy use_critic", used_by="plugin.py"),
    Symbol("verl.trainer.main_ppo:", has="validate_config", used_by="plugin.py"),
    Symbol("verl.trainer.ppo.v1.trainer_base:get_trainer_cls", "name", used_by="plugin.py"),
    Symbol("verl.trainer.ppo.v1.trainer_base:register_trainer", "name", used_by="trainer/register.py"),
    Symbol("verl.trainer.ppo.v1.trainer_base:", has="TRAINER_REGISTRY", used_by="trainer/register.py"),
    # The trainer.
    Symbol("verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync", used_by="trainer/register.py"),
    Symbol("verl.trainer.ppo.v1.trainer_colocate_async:PPOTrainerColocateAsync", used_by="trainer/register.py"),
    Symbol(
        "verl.trainer.ppo.v1.trainer_colocate_async:PPOTrainerColocateAsync.on_sample_end",
        says=("abort_replicas()", "sleep_replicas()"),
        used_by="trainer/mixin.py",
    ),
    Symbol(
        "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync",
        has="standalone_server_manager current_mode",
        used_by="trainer/register.py",
    ),
    Symbol("verl.trainer.ppo.v1.trainer_separate_async:HybridEngineMode", has="ROLLOUT", used_by="trainer/register.py"),
    Symbol(
        _TRAINER,
        has="_setup _init_resource_pool_mgr get_llm_client on_init_end on_sample_begin on_sample_end on_step_end "
        "on_validate_end _save_checkpoint config global_steps actor_rollout_wg llm_server_manager replay_buffer "
        "resource_pool_manager role_worker_mapping local_trigger_step parameter_sync_step",
        used_by="trainer/mixin.py",
    ),
    Symbol(f"{_TRAINER}._add_prompts_to_generate", "num_prompts", used_by="trainer/mixin.py"),
    Symbol(f"{_TRAINER}._build_replay_buffer", says=("refill_fn=self._add_prompts",), used_by="trainer/mixin.py"),
    Symbol(f"{_TRAINER}.__init__", "config", used_by="trainer/mixin.py"),
    Symbol(f"{_TRAINER}.fit", "agent_loop_manager", used_by="trainer/mixin.py"),
    Symbol(f"{_TRAINER}._compute_reward_colocate", "batch metrics", used_by="trainer/mixin.py"),
    Symbol(f"{_TRAINER}._compute_old_log_prob", "batch metrics", used_by="trainer/mixin.py"),
    Symbol(f"{_TRAINER}._update_actor", "batch metrics", used_by="trainer/mixin.py"),
    Symbol(f"{_TRAINER}._compute_metrics", "batch metrics timing_raw", used_by="trainer/mixin.py"),
    Symbol(
        "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer",
        has="filter_groups_metric sync_refill_failed_groups finished_keys pending_keys running_keys poll_interval",
        used_by="trainer/pending_work.py",
    ),
    Symbol(
        "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._sync_metadata_from_transfer_queue",
        says=("self.pending_keys.clear()", "tq.kv_list()"),
        used_by="trainer/pending_work.py",
    ),
    Symbol("verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync", used_by="../demo/toy/sampler.py", cpu_only=True),
    Symbol("verl.trainer.ppo.utils:Role", has="ActorRollout ActorRolloutRef Actor", used_by="trainer/mixin.py"),
    Symbol("verl.utils.fs:copy_to_local", "src", used_by="trainer/mixin.py"),
    Symbol("verl.utils.checkpoint.checkpoint_manager:find_latest_ckpt_path", "path", used_by="trainer/mixin.py"),
    Symbol(
        "verl.single_controller.ray.base:RayResourcePool",
        has="get_placement_groups max_colocate_count",
        used_by="trainer/fleet.py",
    ),
    Symbol("verl.plugin.platform.platform_manager:get_platform", used_by="trainer/fleet.py"),
    Symbol(
        "verl.plugin.platform.platform_base:PlatformBase.ray_resource_options", "num_gpus", used_by="trainer/fleet.py"
    ),
    # Rollout, verl's side.
    Symbol("verl.workers.rollout.replica:RolloutReplicaRegistry.register", "name loader", used_by="trainer/mixin.py"),
    Symbol(
        "verl.workers.rollout.replica:RolloutReplica",
        has="servers _server_address _server_handle is_reward_model is_teacher_model",
        used_by="trainer/fleet.py",
    ),
    Symbol("verl.workers.rollout.llm_server:LLMServerClient.generate", "request_id", used_by="server/client.py"),
    Symbol(
        "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate",
        "request_id",
        says=("await super().generate(", 'output.stop_reason not in ("aborted", "abort")'),
        used_by="server/client.py",
    ),
    Symbol(
        "verl.workers.rollout.llm_server:LLMServerManager",
        has="get_client get_replicas global_load_balancer",
        used_by="trainer/fleet.py",
    ),
    Symbol("verl.workers.rollout.llm_server:LLMServerManager.get_client", "client_cls", used_by="trainer/register.py"),
    Symbol(
        "verl.workers.rollout.router:GlobalRequestLoadBalancer",
        has="add_servers remove_servers get_status",
        used_by="trainer/fleet.py",
    ),
    Symbol(
        "verl.workers.rollout.router:GlobalRequestLoadBalancer.remove_servers", "server_ids", used_by="trainer/fleet.py"
    ),
    Symbol("verl.workers.rollout.router:GlobalRequestLoadBalancer.add_servers", "servers", used_by="trainer/fleet.py"),
    Symbol(
        _SERVER,
        has="_preprocess_engine_kwargs _get_worker_extension_cls clear_kv_cache sleep open_submission_gate config "
        "model_config engine node_rank replica_rank _submission_paused _rejecting _resume_event _admitting",
        used_by="server/server.py",
    ),
    Symbol(f"{_SERVER}._post_init", "cuda_visible_devices", used_by="server/server.py"),
    Symbol(f"{_SERVER}._preprocess_engine_kwargs", "engine_kwargs", used_by="server/server.py"),
    Symbol(f"{_SERVER}.wake_up", "tags", used_by="server/server.py"),
    Symbol(f"{_SERVER}.abort_all_requests", "reset_prefix_cache reject_request", used_by="server/server.py"),
    Symbol(
        "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica",
        has="server_class",
        used_by="server/server.py",
    ),
    Symbol("verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension", used_by="vllm_worker/extension.py"),
    # The actor.
    Symbol(
        "verl.workers.engine_workers:ActorRolloutRefWorker", has="actor_worker_cls actor", used_by="actor/worker.py"
    ),
    Symbol(
        "verl.workers.engine_workers:ActorRolloutRefWorker.update_weights",
        "global_steps mode",
        used_by="actor/worker.py",
    ),
    Symbol("verl.experimental.separation.engine_workers:DetachActorWorker", used_by="actor/worker.py"),
    Symbol("verl.workers.engine_workers:TrainingWorker.infer_batch", "data", used_by="actor/worker.py"),
    Symbol(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.forward_step",
        "micro_batch loss_function forward_only",
        used_by="actor/fsdp_adapter.py",
    ),
    Symbol(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
        has="get_per_tensor_param get_data_parallel_rank use_ulysses_sp ulysses_parallel_group module engine_config "
        "model_config",
        used_by="actor/fsdp_adapter.py",
    ),
    Symbol(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead.forward_step",
        "batch_iter model",
        says=("batch: TensorDict = next(batch_iter)",),
        used_by="actor/megatron_adapter.py",
    ),
    Symbol(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine",
        has="get_per_tensor_param get_data_parallel_rank _get_context_parallel_layout module engine_config mode",
        used_by="actor/megatron_adapter.py",
    ),
    Symbol("verl.utils.megatron_utils:unwrap_model", "model", used_by="actor/megatron_adapter.py"),
    Symbol(
        "verl.workers.config.engine:McoreEngineConfig",
        has="strategy dynamic_context_parallel",
        used_by="actor/megatron_adapter.py",
    ),
    Symbol(
        "verl.models.mcore.util:preprocess_thd_engine",
        says=("cu_seqlens_q_padded=cu_seqlens_padded",),
        used_by="actor/megatron_adapter.py",
    ),
    Symbol("verl.single_controller.base.decorator:register", "dispatch_mode", used_by="actor/worker.py"),
    Symbol("verl.utils.tensordict_utils:get", "tensordict key default", used_by="actor/worker.py"),
    # verl on a CPU, and the toy.
    Symbol(
        "verl.plugin.platform.platform_manager:PlatformRegistry.register",
        "platform",
        used_by="compat/cpu/platform.py",
        cpu_only=True,
    ),
    Symbol(
        "verl.utils.model:load_valuehead_model",
        "local_path torch_dtype model_config trust_remote_code",
        used_by="compat/cpu/verl_shims.py",
        cpu_only=True,
    ),
    Symbol(
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver.receive_weights",
        "on_bucket_received",
        used_by="compat/cpu/verl_shims.py",
        cpu_only=True,
    ),
    Symbol(
        "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run",
        "sampling_params",
        used_by="../demo/toy/agent.py",
        cpu_only=True,
    ),
    Symbol(
        "verl.experimental.agent_loop.tool_parser:ToolParser.extract_tool_calls",
        "responses_ids tools",
        used_by="../demo/toy/agent.py",
        cpu_only=True,
    ),
    Symbol(
        "verl.workers.rollout.router:GlobalRequestLoadBalancer.acquire_server",
        "request_id",
        says=("self._servers", "self._inflight_requests[server_id] += 1"),
        used_by="../demo/toy/routing.py",
        cpu_only=True,
    ),
    Symbol(
        "verl.workers.rollout.router:get_router_handle",
        "servers router_config_path",
        used_by="../demo/toy/routing.py",
        cpu_only=True,
    ),
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
    Symbol(f"{_SCHEDULER}.shutdown", used_by="engine_core/scheduler.py"),
    Symbol("vllm.v1.engine.core:EngineCore", has="scheduler", used_by="engine_core/empty_drafts.py"),
    Symbol(
        "vllm.v1.engine.core:EngineCore.post_step",
        "model_executed",
        says=("take_draft_token_ids()",),
        used_by="engine_core/empty_drafts.py",
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
        used_by="vllm_worker/extension.py",
    ),
    Symbol(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
        has="model take_last_draft_probs _last_draft_probs num_speculative_tokens device",
        used_by="vllm_worker/extension.py",
    ),
    Symbol(f"{_RUNNER}.get_model", used_by="vllm_worker/extension.py"),
    Symbol(_RUNNER, has="drafter use_async_scheduling input_batch", used_by="vllm_worker/extension.py"),
    Symbol(
        f"{_RUNNER}.propose_draft_token_ids",
        "scheduler_output",
        says=("num_speculative_tokens=num_spec_tokens_to_schedule", "common_attn_metadata=common_attn_metadata"),
        used_by="vllm_worker/extension.py",
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
        used_by="engine_core/ngram_drafts.py",
    ),
    Symbol(f"{_RUNNER}.execute_model", "scheduler_output", used_by="engine_core/ngram_drafts.py"),
    # n-grams alone: a proposer of our own, through vLLM's extension point.
    Symbol(
        f"{_RUNNER}.propose_draft_token_ids",
        says=('spec_config.method == "custom_class"',),
        used_by="engine_core/ngram_drafts.py",
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
    Symbol("vllm.config:", has="set_current_vllm_config", used_by="vllm_worker/extension.py"),
    Symbol("vllm.distributed.parallel_state:get_tensor_model_parallel_rank", used_by="vllm_worker/extension.py"),
    Symbol(
        "vllm.distributed.communication_op:tensor_model_parallel_all_reduce",
        "input_",
        used_by="vllm_worker/extension.py",
    ),
    # The engine from outside.
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
    # vLLM on a CPU.
    Symbol(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        "layer remove_weight",
        used_by="compat/cpu/vllm_shims.py",
        cpu_only=True,
    ),
    Symbol("vllm.utils.cpu_triton_utils:", has="expand_kernel", used_by="compat/cpu/vllm_shims.py", cpu_only=True),
    Symbol(
        "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",
        "timeout_ms",
        says=("self.last_read", "self.busy_loop_s"),
        used_by="compat/cpu/vllm_shims.py",
        cpu_only=True,
    ),
    Symbol(
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        "x cu_num_tokens num_tokens replace_from replace_to",
        used_by="compat/cpu/vllm_shims.py",
        cpu_only=True,
    ),
)
"""Everything outside the documented interfaces; a test compares it with our imports."""
