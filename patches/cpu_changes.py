"""Every change to verl, vLLM and megatron-core that the CPU platform makes; only where `VERL_PLATFORM=cpu`.

The fields: `UpstreamChange` in upstream_changes.py.
"""

from __future__ import annotations

from patches.upstream_changes import UpstreamChange

VERL, VLLM, MEGATRON = "verl 0.9.1", "vllm 0.28 on its CPU backend", "megatron-core 0.16.1"
NO_CUDA = "Nothing: it is no defect of code written for CUDA. It is a stand-in for the hardware."

CHANGES = (
    UpstreamChange(
        name="the process-group backend names each device once",
        changes=("torch.distributed:init_process_group",),
        symptom='torch rejects `cpu:gloo,cpu:gloo`: "Duplicate device type cpu in backend string".',
        cause='`verl/utils/distributed.py:63` `backend = f"cpu:gloo,{get_device_name()}` names the CPU twice '
        "where it is the device.",
        applied_by="verl_cpu.verl_shims:name_devices_once",
        releases=VERL,
        removed_by="The patch; the shim changes nothing in what it builds.",
        upstream="https://github.com/verl-project/verl/issues/6237 (open) is this very error; "
        "https://github.com/verl-project/verl/pull/6086 (merged) introduced platforms",
        patch="verl/0002-cpu-backend-named-once.patch",
    ),
    UpstreamChange(
        name="received weights outlive the shared memory they came in",
        changes=("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver.receive_weights",),
        symptom='A weight sync ends in "BufferError: cannot close exported pointers exist".',
        cause="`verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py:297` `tensor = "
        "tensor.to(self.device)` copies nothing on a CPU, and the buffer is closed under a live view.",
        applied_by="verl_cpu.verl_shims:clone_buckets",
        releases=VERL,
        removed_by="The patch: the shim leaves a receiver that copies.",
        upstream="none found; https://github.com/verl-project/verl/pull/6958 (closed) reworked the CUDA-IPC path "
        "beside it",
        patch="verl/0003-copy-weights-out-of-shared-memory.patch",
    ),
    UpstreamChange(
        name="offloaded parameters are pinned for accelerators only",
        changes=("verl.workers.engine.fsdp.transformer_impl:",),
        symptom='No run with a KL loss starts: "Cannot access accelerator device when none is available".',
        cause="`verl/workers/engine/fsdp/transformer_impl.py:462` `offload_policy = "
        "CPUOffloadPolicy(pin_memory=True)`, for every reference policy.",
        applied_by="verl_cpu.verl_shims:offload_unpinned",
        releases=VERL,
        removed_by="The patch: the shim leaves an engine that does not pin.",
        upstream="none found; https://github.com/verl-project/verl/pull/6086 (merged) introduced platforms and "
        "this case",
        patch="verl/0004-pin-for-accelerators-only.patch",
    ),
    UpstreamChange(
        name="a critic is loaded with the attention its config names",
        changes=("verl.utils.model:load_valuehead_model",),
        symptom="PPO does not run without flash-attn; the message blames a missing value head.",
        cause='`verl/utils/model.py:649` `attn_implementation="flash_attention_2"` whatever '
        "`critic.model.override_config.attn_implementation` says.",
        applied_by="verl_cpu.verl_shims:critic_attention",
        releases=VERL,
        removed_by="The patch: the shim leaves a loader that reads the config.",
        patch="verl/0005-critic-attention-from-its-config.patch",
    ),
    UpstreamChange(
        name="a Megatron engine may compute in float32",
        changes=("verl.workers.config.engine:McoreEngineConfig.__post_init__",),
        symptom="16 bits are emulated on most CPUs, and cannot be compared with a float32 rollout's probabilities.",
        cause='`verl/workers/config/engine.py:218` `assert self.dtype in ["bfloat16", "float16"]`, while FSDP '
        "engines take `model_dtype=fp32`.",
        applied_by="verl_cpu.verl_shims:megatron_in_float32",
        releases=VERL,
        removed_by="The patch: the shim leaves a config that allows float32.",
        upstream="none found; https://github.com/verl-project/verl/pull/6086 (merged) introduced platforms and "
        "this case",
        patch="verl/0006-megatron-in-float32.patch",
    ),
    UpstreamChange(
        name="linear weights stay as they were loaded",
        changes=("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",),
        symptom="A weight sync fails with \"'Parameter' object has no attribute 'weight_loader'\".",
        cause="`vllm/model_executor/layers/utils.py:269` `def dispatch_cpu_unquantized_gemm` packs every linear "
        "weight and leaves an empty parameter in its place.",
        applied_by="verl_cpu.vllm_shims:keep_linear_weights",
        releases=VLLM,
        removed_by="The patch, whose VLLM_CPU_PREPACK_LINEAR=0 the shim sets instead.",
        upstream="none found; https://github.com/verl-project/verl/pull/7987 (open) would reload layer by layer, "
        "after which packing could stay on",
        patch="vllm/0001-cpu-keep-linear-weights.patch",
    ),
    UpstreamChange(
        name="per-token sampling parameters are filled in the caller's dtype",
        changes=("vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",),
        symptom="Speculation above temperature 0 samples from a wrong distribution, returns NaN or indexes out "
        "of bounds.",
        cause="`vllm/utils/cpu_triton_utils.py:408` `def _expand_kernel_impl` hands the kernel an int64 copy of "
        "its output and drops the copy. Copying back would not do: temperatures below 1 become 0.",
        applied_by="verl_cpu.vllm_shims:fix_expand_batch",
        releases=VLLM,
        removed_by="The patch: the shim leaves a kernel that fills its output.",
        upstream="https://github.com/vllm-project/vllm/issues/55005 and "
        "https://github.com/vllm-project/vllm/pull/55006 (both open); "
        "https://github.com/vllm-project/vllm/pull/42638 (closed) was an earlier attempt",
        patch="vllm/0002-cpu-expand-in-the-callers-dtype.patch",
    ),
    UpstreamChange(
        name="a message queue's reader sleeps between two looks",
        changes=("vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",),
        symptom="Engine core and worker each keep a core busy while they wait for the other; on the CPU backend "
        "those cores are the accelerator.",
        cause="`vllm/distributed/device_communicators/shm_broadcast.py:203` `if current_time <= self.last_read + "
        "self.busy_loop_s` yields in a loop for a second after each message. A shorter window stalls: the "
        "notification socket (SNDHWM 1) drops a message that follows closely.",
        applied_by="verl_cpu.vllm_shims:sleep_between_looks",
        releases=VLLM,
        removed_by="The patch, whose VLLM_SHM_BROADCAST_BUSY_SLEEP_S the shim sets instead.",
        upstream="https://github.com/vllm-project/vllm/pull/52848 (open) proposes such a sleep; "
        "https://github.com/vllm-project/vllm/pull/52814 (open) the shorter window",
        patch="vllm/0004-sleep-between-looks.patch",
    ),
    UpstreamChange(
        name="experts' weights stay as they were loaded",
        changes=("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",),
        symptom="After a weight sync every expert computes with shuffled numbers; nothing fails.",
        cause='`vllm/model_executor/layers/fused_moe/experts/cpu_moe.py:306` `layer, "w13_weight", '
        "cpu_prepack_moe_weight(layer.w13_weight, self.isa)` packs into parameters of the same shape.",
        applied_by="verl_cpu.vllm_shims:keep_expert_weights",
        releases=VLLM,
        removed_by="The patch, whose VLLM_CPU_PREPACK_MOE=0 the shim sets instead.",
        patch="vllm/0006-cpu-keep-expert-weights.patch",
    ),
    UpstreamChange(
        name="linear attention verifies drafts of any length",
        changes=("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward",),
        symptom="With a hybrid policy wrong log-probabilities, and no error, for drafts shorter than the longest; an "
        "engine that ends where their length changes.",
        cause="`vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py:459` `keep = B[:, offset + 1 : offset + 1 + "
        "(state_len - q_i)]` fills the buffer of the convolution from its end, and the next step reads it from its "
        "beginning. The Triton kernel does not (`causal_conv1d.py`).",
        applied_by="verl_cpu.vllm_shims:convolve_any_draft",
        releases=VLLM,
        removed_by="The patch: the shim leaves a function that fills it from the beginning.",
        patch="vllm/0010-cpu-convolve-any-draft-length.patch",
    ),
    UpstreamChange(
        name="an engine may be started with sleep mode",
        changes=("vllm.platforms.interface:Platform.is_sleep_mode_available",),
        symptom='"Sleep mode is not supported on current platform", which verl asks for by default.',
        cause="`vllm/platforms/interface.py:229` `return self._enum in (PlatformEnum.CUDA, PlatformEnum.ROCM, "
        "PlatformEnum.XPU)`.",
        applied_by="verl_cpu.vllm_shims:sleep_is_available",
        releases=VLLM,
        removed_by=NO_CUDA,
    ),
    UpstreamChange(
        name="sleep takes weights and KV cache away",
        changes=("vllm.v1.worker.cpu_worker:CPUWorker.sleep", "vllm.v1.worker.cpu_worker:CPUWorker.wake_up"),
        symptom="What would end an engine on a GPU, or leave it with garbage, goes unnoticed: memory is touched while "
        "it is not mapped, or is expected to hold what it held before.",
        cause='`vllm/v1/worker/cpu_worker.py:193` `logger.warning("sleep mode is not supported on CPU, ignore it.")`.',
        applied_by="verl_cpu.vllm_shims:sleep_as_on_a_gpu",
        releases=VLLM,
        removed_by=NO_CUDA,
    ),
    UpstreamChange(
        name="float32 parameters are loaded into the distributed optimizer",
        changes=(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        ),
        symptom='"a view of a leaf Variable that requires grad is being used in an in-place operation".',
        cause="`megatron/core/optimizer/distrib_optimizer.py:940` `dst_tensors[key].copy_(tensors[key])` writes "
        "into views of the model's own leaves; with 16 bits they are copies.",
        applied_by="verl_cpu.megatron_shims:load_without_gradients",
        releases=MEGATRON,
        removed_by="The patch: the shim leaves an optimizer that records nothing.",
        upstream="https://github.com/NVIDIA/Megatron-LM/pull/2681 (open) mends this line in the same way",
        patch="megatron-core/0001-load-without-gradients.patch",
    ),
    UpstreamChange(
        name="a checkpoint is loaded before the optimizer's first step",
        changes=("megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",),
        symptom="An AssertionError on resume without Apex and Transformer Engine.",
        cause="`megatron/core/optimizer/distrib_optimizer.py:642` `assert len(steps) == 1` of torch's Adam, "
        "which has no state before its first step.",
        applied_by="verl_cpu.megatron_shims:state_before_the_first_step",
        releases=MEGATRON,
        removed_by="The patch.",
        patch="megatron-core/0002-state-before-the-first-step.patch",
    ),
    UpstreamChange(
        name="tokens are routed to experts without Transformer Engine",
        changes=("megatron.core.transformer.moe.moe_utils:",),
        symptom="NameError: name 'te_general_gemm' is not defined.",
        cause="`megatron/core/transformer/moe/moe_utils.py:1192` `if te_general_gemm is not None and "
        "router_dtype` asks for a name that is there only where it could be imported.",
        applied_by="verl_cpu.megatron_shims:router_without_transformer_engine",
        releases=MEGATRON,
        removed_by="The patch.",
        patch="megatron-core/0003-router-without-transformer-engine.patch",
    ),
    UpstreamChange(
        name="verl's Megatron engine allocates on the CPU",
        changes=("verl.workers.engine.megatron.transformer_impl:MegatronEngine",),
        symptom='"Torch not compiled with CUDA enabled": allocations on "cuda", pinned memory, names of types, '
        "streams.",
        cause="`megatron/core/transformer/moe/moe_utils.py:1098` "
        "`tensor.record_stream(torch.cuda.current_stream())` and many more: while the engine's own methods run, "
        "CUDA means the CPU (`verl_cpu/megatron_cuda.py`).",
        applied_by="verl_cpu.megatron_shims:engine_on_cpu",
        releases=MEGATRON,
        removed_by=NO_CUDA,
    ),
    UpstreamChange(
        name="Megatron's random states are the CPU's",
        changes=("megatron.core.tensor_parallel.random:_get_cuda_rng_state",),
        symptom="An AssertionError at the first dropout.",
        cause="`megatron/core/tensor_parallel/random.py:125` `orig_cuda_rng_state = "
        "_get_cuda_rng_state(graph_safe=False)` calls torch's private functions for CUDA.",
        applied_by="verl_cpu.megatron_shims:random_state_of_cpu",
        releases=MEGATRON,
        removed_by=NO_CUDA,
    ),
    UpstreamChange(
        name="Megatron's layers need no Transformer Engine",
        changes=("megatron.core.models.gpt.gpt_layer_specs:",),
        symptom="NameError: name 'TESpecProvider' is not defined.",
        cause="`megatron/core/models/gpt/gpt_layer_specs.py:50` `HAVE_TE = False`: verl's engine takes its "
        "norms, attention and experts from Transformer Engine, which needs CUDA (`verl_cpu/megatron_layers.py` "
        "has them).",
        applied_by="verl_cpu.megatron_shims:layers_without_transformer_engine",
        releases=MEGATRON,
        removed_by=NO_CUDA,
    ),
    UpstreamChange(
        name="the token dispatcher gets its counts as numbers",
        changes=("megatron.core.transformer.moe.token_dispatcher:",),
        symptom="Splits stay tensors on a CPU, where the dispatcher expects arrays.",
        cause="`megatron/core/transformer/moe/moe_utils.py:1093` `if torch.is_tensor(tensor) and tensor.is_cuda` "
        "converts only what it moves from a device.",
        applied_by="verl_cpu.megatron_shims:splits_of_cpu",
        releases=MEGATRON,
        removed_by=NO_CUDA,
    ),
    UpstreamChange(
        name="ranks exchange parts of unequal length over gloo",
        changes=(
            "megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
            "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
        ),
        symptom="Experts get as many tokens as come, and gloo gathers equal parts only.",
        cause="`megatron/core/tensor_parallel/mappings.py:150` `torch.distributed.all_gather(output_tensor_list, "
        "input_` relies on NCCL.",
        applied_by="verl_cpu.unequal_parts:mend",
        releases=MEGATRON,
        removed_by=NO_CUDA,
    ),
)
