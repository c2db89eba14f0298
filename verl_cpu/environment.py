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

if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in CPU_ENGINE.items()))
