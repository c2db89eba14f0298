"""Fixtures of the tests of what runs in vLLM's workers."""

import importlib
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def draft_rows(monkeypatch):
    """The module of kernels, under Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in [name for name in sys.modules if name.startswith("triton") and "triton._C" not in name]:
        monkeypatch.delitem(sys.modules, module)  # what it defines itself is interpreted if it was imported so
    triton = importlib.import_module("triton")
    interpreted = SimpleNamespace(triton=triton, tl=importlib.import_module("triton.language"))
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", interpreted)  # vLLM has a stand-in where there is no GPU
    name = "verl_tlt.vllm_worker.draft_rows"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)
