"""The rejection kernels that GPUs run give the target's distribution; under Triton's interpreter, without a GPU."""

import sys
from pathlib import Path

import pytest
from draws import CAUGHT
from tiny_engine import run_script

from benchmarks.lossless.judged import FAILS
from verl_tlt.speculation.graph_rules import V2_DRAFTS_FROM

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from releases import VLLM, sources

pytestmark = [pytest.mark.engine, pytest.mark.heavy]
V2 = [version for version in VLLM if tuple(map(int, version.split(".")[:2])) >= V2_DRAFTS_FROM]


def judge(p, wrong):
    """Cases that are known to be wrong are found out, and no other one is."""
    assert all(p[name] < CAUGHT for name in wrong), p
    assert all(value > FAILS for name, value in p.items() if name not in wrong), p


def test_vllms_triton_kernels_are_exact_and_are_fooled_by_nan():
    pytest.importorskip("triton")
    judge(run_script("rejection_kernels.py"), {"NaN", "off by a half"})


@pytest.mark.parametrize("version", V2)
def test_so_are_those_of_the_v2_model_runner(version):
    pytest.importorskip("triton")
    judge(run_script("rejection_kernels_v2.py", sources("vllm", version)), {"NaN"})
