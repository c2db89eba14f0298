"""Each CPU shim does what it says, and stock still needs it: a test here fails once upstream has caught up.

Shims whose diff is in `patches` have that in test_patches.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("shim_checks.py")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VERL_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
    "VERL_PLATFORM": "cpu",
    # Plugins are off, so a process has the shims it asks for and no others.
    "VLLM_PLUGINS": "", "VERL_USE_EXTERNAL_PLUGINS": "none",
    # Without the tests' own start of Python, which looks for garbage seldom.
    "PYTHONPATH": str(CHECKS.parents[2]),
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    """{"shim" or "stock": {check: what it found}}, of a fresh process each: a shim, once applied, stays."""
    environment = {k: v for k, v in os.environ.items() if k != "VERL_ENGINE_DEVICE"} | ENVIRONMENT
    how = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = {name: subprocess.Popen([sys.executable, str(CHECKS), name], **how) for name in ("shim", "stock")}
    results = {}
    for name, process in started.items():
        said, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-2000:]
        results[name] = dict(json.loads(line) for line in said.splitlines() if line.startswith('["'))
    return results


@pytest.mark.parametrize(
    ("check", "shim", "stock"),
    [
        ("entry", [50_000, "cuda"], [700, None]),
        ("linear", "right", "gone"),
        ("experts", "right", "packed"),
        ("backend", "started", "ValueError"),
        ("critic", "1 value", "no value head"),
        ("queue", [["one", "two"], True], [["one", "two"], False]),
        ("sleep", [True, "NaN", "kept"], [False, "kept", "kept"]),
        ("megatron_layers", "PackedAttention", "name 'TESpecProvider' is not defined"),
        ("megatron_router", "8", "name 'te_general_gemm' is not defined"),
        ("megatron_fresh", "step 0", "no step"),
        ("megatron_random", "the CPU's", "AssertionError"),
        ("megatron_engine", "47 tensors", "Torch not compiled with CUDA enabled"),
    ],
)
def test_only_with_the_shim(found, check, shim, stock):
    assert found["shim"][check] == shim
    assert found["stock"][check] == stock
