"""The environment variables that vLLM and verl need on a machine without an accelerator; standard library only.

For a shell: `export $(python -m verl_cpu.environment)`.
"""

CPU_ENGINE = {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles its sampler with g++ otherwise
    "OMP_NUM_THREADS": "1",  # threads of several processes that spin against each other cost 10-60x
}
"""What an engine needs."""

CPU_RUN = CPU_ENGINE | {
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engines under "cuda"; they run on any torch device
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors without a GPU keep CUDA_VISIBLE_DEVICES
    "RAY_prestart_worker_first_driver": "0",  # Ray would start a process per CPU, which verl's actors do not use
    "RAY_AUTH_MODE": "disabled",  # the cluster of a run needs no token, even if this machine has one
    "RAY_DEDUP_LOGS": "0",  # log a line also if another process has logged one like it
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported over the network
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # all models are in folders
    "TOKENIZERS_PARALLELISM": "false",  # no threads beside those that compute
}
"""What a whole run of verl needs."""

if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in CPU_ENGINE.items()))
