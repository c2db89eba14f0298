"""The rejection kernels that GPUs run give the target's distribution; under Triton's interpreter, without a GPU."""

import pytest
from draws import CAUGHT
from tiny_engine import run_script

from benchmarks.lossless.judged import FAILS

pytestmark = [pytest.mark.engine, pytest.mark.heavy]


def test_vllms_triton_kernels_are_exact_and_are_fooled_by_nan():
    pytest.importorskip("triton")
    p = run_script("rejection_kernels.py")
    wrong = {"NaN", "off by a half"}
    assert all(p[name] < CAUGHT for name in wrong), p
    assert all(value > FAILS for name, value in p.items() if name not in wrong), p
