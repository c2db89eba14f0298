"""The rejection kernels that GPUs run give the target's distribution; under Triton's interpreter, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from draws import CAUGHT, FAILS

pytestmark = [pytest.mark.engine, pytest.mark.heavy]


def test_vllms_triton_kernels_are_exact_and_are_fooled_by_nan():
    pytest.importorskip("triton")
    script = Path(__file__).with_name("rejection_kernels.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    p = json.loads(done.stdout.splitlines()[-1])
    wrong = {"NaN", "off by a half"}
    assert all(p[name] < CAUGHT for name in wrong), p
    assert all(value > FAILS for name, value in p.items() if name not in wrong), p
