"""Each CPU shim does what it says, and stock still needs it: a test here fails once upstream has caught up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("shim_checks.py")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VERL_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VERL_PLATFORM": "cpu",
    # Plugins are off, so a process has the shims it asks for and no others.
    "VLLM_PLUGINS": "",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    # Without the tests' own start of Python, which looks for garbage seldom.
    "PYTHONPATH": str(CHECKS.parents[2]),
}


@pytest.fixture(scope="module")
def found():
    """{"shim" or "stock": {check: what it found}}, of a fresh process each: a shim, once applied, stays."""
    environment = {k: v for k, v in os.environ.items() if k != "VERL_ENGINE_DEVICE"} | ENVIRONMENT
    processes = {
        name: subprocess.Popen(
            [sys.executable, str(CHECKS), name],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("shim", "stock")
    }
    results = {}
    for name, process in processes.items():
        said, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-2000:]
        results[name] = dict(json.loads(line) for line in said.splitlines() if line.startswith('["'))
    return results


@pytest.mark.parametrize(
    ("check", "shim", "stock"),
    [
        pytest.param("entry", [50_000, "cuda"], [700, None], id="imports are not held up and FSDP is found"),
        pytest.param("expand", True, False, id="expand_batch is right"),
        pytest.param("linear", "right", "gone", id="linear weights survive loading"),
        pytest.param("experts", "right", "packed", id="experts' weights survive loading"),
        pytest.param("backend", "started", "ValueError", id="a backend that names the CPU twice starts"),
        pytest.param("critic", "1 value", "no value head", id="a critic loads without flash-attention"),
        pytest.param("queue", [["one", "two"], True], [["one", "two"], False], id="a reader sleeps between looks"),
        pytest.param("sleep", [True, "NaN", "kept"], [False, "kept", "kept"], id="sleep takes weights away"),
        pytest.param("megatron_dtype", "float32", "16 bits only", id="a Megatron engine computes in float32"),
        pytest.param(
            "megatron_layers",
            "PackedAttention",
            "name 'TESpecProvider' is not defined",
            id="Megatron's layers need no Transformer Engine",
        ),
        pytest.param("megatron_router", "8", "name 'te_general_gemm' is not defined", id="Megatron routes to experts"),
        pytest.param("megatron_load", "loaded 4", "a view of a leaf Variable", id="Megatron loads float32 parameters"),
        pytest.param("megatron_fresh", "step 0", "no step", id="Megatron loads before its first step"),
        pytest.param("megatron_random", "the CPU's", "AssertionError", id="Megatron keeps the CPU's random state"),
        pytest.param(
            "megatron_engine", "47 tensors", "Torch not compiled with CUDA enabled", id="verl's Megatron engine starts"
        ),
        pytest.param("buckets", "kept", "BufferError", id="received weights outlive their shared memory"),
    ],
)
def test_only_with_the_shim(found, check, shim, stock):
    assert found["shim"][check] == shim
    assert found["stock"][check] == stock
