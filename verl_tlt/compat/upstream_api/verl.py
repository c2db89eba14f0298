"""What verl-tlt relies on in verl."""

from __future__ import annotations

from verl_tlt.compat.upstream_api.symbol import Symbol

_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"

VERL = (
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
    # The drafter is complete between the two, and goes when the policy's directory does.
    Symbol(
        f"{_TRAINER}._save_checkpoint",
        says=(
            'os.path.join(local_global_step_folder, "actor")',
            "self.actor_rollout_wg.save_checkpoint(",
            '"latest_checkpointed_iteration.txt"',
        ),
        used_by="trainer/checkpoints.py",
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
        used_by="trainer/watch.py",
    ),
    Symbol(
        "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._sync_metadata_from_transfer_queue",
        says=("self.pending_keys.clear()", "tq.kv_list()"),
        used_by="trainer/watch.py",
    ),
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
        used_by="actor/adapters.py",
    ),
    Symbol(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
        has="get_per_tensor_param get_data_parallel_rank use_ulysses_sp ulysses_parallel_group module engine_config "
        "model_config",
        used_by="actor/adapters.py",
    ),
    Symbol(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead.forward_step",
        "batch_iter model",
        says=("batch: TensorDict = next(batch_iter)",),
        used_by="actor/adapters.py",
    ),
    Symbol(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine",
        has="get_per_tensor_param get_data_parallel_rank _get_context_parallel_layout module engine_config mode",
        used_by="actor/adapters.py",
    ),
    Symbol("verl.utils.megatron_utils:unwrap_model", "model", used_by="actor/adapters.py"),
    Symbol(
        "verl.workers.config.engine:McoreEngineConfig",
        has="strategy dynamic_context_parallel use_megatron_fsdp",
        used_by="actor/adapters.py",
    ),
    Symbol(
        "verl.models.mcore.util:preprocess_thd_engine",
        says=("cu_seqlens_q_padded=cu_seqlens_padded",),
        used_by="actor/adapters.py",
    ),
    Symbol("verl.single_controller.base.decorator:register", "dispatch_mode", used_by="actor/worker.py"),
    Symbol("verl.utils.tensordict_utils:get", "tensordict key default", used_by="actor/worker.py"),
)
