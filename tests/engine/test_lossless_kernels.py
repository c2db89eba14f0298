"""vLLM's Triton kernels of rejection, which GPUs run, give the target's distribution; in Triton's interpreter.

Those of the V2 model runner run in whole engines (test_v2_runner.py, test_v2_distribution.py).
"""

import pytest
from draws import CAUGHT
from tiny_engine import run_script

from benchmarks.lossless.judged import FAILS

pytestmark = [pytest.mark.engine, pytest.mark.heavy]


def test_vllms_triton_kernels_are_exact_and_are_fooled_by_nan():
    pytest.importorskip("triton")
    p = run_script("rejection_kernels.py")
    assert p["NaN"] < CAUGHT and p["off by a half"] < CAUGHT, p
    assert p["sound"] > FAILS and p["certain"] > FAILS, p
