"""The environment of every test: set before any test module is collected, since verl and vLLM read it when imported."""

import os

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    TORCH_COMPILE_DISABLE="1",  # vLLM compiles its CPU sampler with g++ otherwise
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VERL_PLATFORM="cpu",
    VLLM_LOGGING_LEVEL="WARNING",
)
