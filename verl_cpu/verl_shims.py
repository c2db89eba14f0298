"""What verl 0.9 needs to run on a CPU, one function each.

Every shim is applied after the module it changes was imported, so importing verl costs nothing more.
"""

import functools
from typing import Any

from wrapt import register_post_import_hook

from verl_cpu.placement import use_named_device


def dedupe_backend(backend: str) -> str:
    """'cpu:gloo,cpu:gloo' as 'cpu:gloo': torch rejects a device named twice.

    verl builds `cpu:gloo,<device>:<backend>` (verl/utils/distributed.py), which names the CPU twice there.
    """
    return ",".join(dict.fromkeys(backend.split(",")))


# Changes verl: verl_cpu/README.md#the-process-group-backend-names-each-device-once
def name_devices_once(module: Any) -> None:
    """Have `torch.distributed` start from a backend that names each device once."""
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = dedupe_backend(kwargs["backend"])
        return original(*args, **kwargs)

    module.init_process_group = init_process_group


# Changes verl: verl_cpu/README.md#received-weights-outlive-the-shared-memory-they-came-in
def clone_buckets(module: Any) -> None:
    """Give the weight receiver copies of a bucket, not views of the shared memory it closes next.

    `BucketedWeightReceiver.receive_weights` copies with `tensor.to(device)`, which on a CPU copies nothing, and
    closing the buffer under a live view raises BufferError.
    """
    original = module.BucketedWeightReceiver.receive_weights

    @functools.wraps(original)
    def receive_weights(self: Any, on_bucket_received: Any) -> Any:
        def copy_first(weights: list[tuple[str, Any]], is_last: bool) -> None:
            on_bucket_received([(name, tensor.clone()) for name, tensor in weights], is_last)

        return original(self, copy_first)

    module.BucketedWeightReceiver.receive_weights = receive_weights


# Changes verl: verl_cpu/README.md#offloaded-parameters-are-pinned-for-accelerators-only
def offload_unpinned(module: Any) -> None:
    """Offload FSDP2 parameters to ordinary memory: pages are pinned for an accelerator, and torch refuses without one.

    verl offloads every reference policy (`FSDPEngine._build_fsdp_module`), so no run with a KL loss would start.
    """
    original = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory=False: original(pin_memory=False)


# Changes verl: verl_cpu/README.md#a-critic-is-loaded-with-the-attention-its-config-names
def critic_attention(module: Any) -> None:
    """Load a critic with the attention its config names; verl always asks for flash-attn, which needs a GPU."""
    original = module.load_valuehead_model

    @functools.wraps(original)
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        attention = getattr(model_config, "_attn_implementation", None)
        if attention in (None, "flash_attention_2"):
            return original(local_path, torch_dtype, model_config, trust_remote_code)
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            torch_dtype=torch_dtype,
            config=model_config,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )

    module.load_valuehead_model = load_valuehead_model


# Changes verl: verl_cpu/README.md#a-megatron-engine-may-compute-in-float32
def megatron_in_float32(module: Any) -> None:
    """Let a Megatron engine compute in float32; verl allows 16 bits only, in which few CPUs multiply fast."""
    original = module.McoreEngineConfig.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        wanted = self.dtype
        if wanted == "float32":
            object.__setattr__(self, "dtype", "bfloat16")  # the config is frozen
        original(self)
        object.__setattr__(self, "dtype", wanted)

    module.McoreEngineConfig.__post_init__ = __post_init__


# Changes verl: verl_cpu/README.md#a-rank-runs-on-the-core-of-its-device
def place_ranks(module: Any) -> None:
    """Run a process with a device, an actor's or a critic's rank, on the core that is this device."""
    original = module.Worker.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        use_named_device()

    module.Worker.__init__ = __init__


def register() -> None:
    """Arm every shim in this process."""
    register_post_import_hook(place_ranks, "verl.single_controller.base.worker")
    register_post_import_hook(name_devices_once, "torch.distributed")
    register_post_import_hook(clone_buckets, "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
    register_post_import_hook(offload_unpinned, "verl.workers.engine.fsdp.transformer_impl")
    register_post_import_hook(critic_attention, "verl.utils.model")
    register_post_import_hook(megatron_in_float32, "verl.workers.config.engine")
