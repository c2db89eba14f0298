"""What the CPU platform relies on in verl and vLLM, besides what verl-tlt does; `used_by` is a file of this folder."""

from verl_tlt.upstream.sources import Symbol, by_file

CPU = by_file(
    {
        "platform.py": (
            Symbol("verl.plugin.platform.platform_base:PlatformBase"),
            Symbol("verl.plugin.platform.platform_manager:PlatformRegistry.register", "platform"),
        ),
        "verl_shims.py": (
            Symbol("verl.utils.model:load_valuehead_model", "local_path torch_dtype model_config trust_remote_code"),
            Symbol(
                "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver.receive_weights",
                "on_bucket_received",
            ),
        ),
        "vllm_shims.py": (
            Symbol("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", "layer remove_weight"),
            Symbol("vllm.utils.cpu_triton_utils:", has="expand_kernel"),
            Symbol("vllm.device_allocator:", has="get_mem_allocator_instance"),
            Symbol(
                "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward",
                "layer attn_metadata_i mixed_qkv_spec b_spec a_spec conv_buf ssm_state width state_len",
            ),
            Symbol("vllm._custom_ops:", has="fused_sigmoid_gating_delta_rule_update_spec_cpu"),
            Symbol("vllm.v1.worker.gpu_worker:Worker.sleep", "level", says=("named_buffers()",)),
            Symbol("vllm.v1.worker.gpu_worker:Worker.wake_up", "tags"),
            Symbol("vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context", "tag"),
            Symbol(
                "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",
                "timeout_ms",
                says=("self.last_read", "self.busy_loop_s"),
            ),
            Symbol(
                "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
                "x cu_num_tokens num_tokens replace_from replace_to",
            ),
        ),
    }
)
