"""The environment variables that vLLM and verl need on a machine without an accelerator; standard library only."""

import os

CPU_ENGINE = {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles its sampler with g++ otherwise
    "OMP_NUM_THREADS": "1",  # threads of several processes that spin against each other cost 10-60x
}
"""What an engine needs."""


def engine_environment() -> dict[str, str]:
    """What is to be set for a CPU engine in a child of this process; a value that is set already stays."""
    return {k: v for k, v in CPU_ENGINE.items() if k not in os.environ} | {"VERL_PLATFORM": "cpu"}
