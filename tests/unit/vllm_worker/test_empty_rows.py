"""The kernel that empties rows on an accelerator, under Triton's interpreter."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def empty_rows(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreted = SimpleNamespace(triton=triton, tl=importlib.import_module("triton.language"))
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", interpreted)  # vLLM has a stand-in where there is no GPU
    name = "verl_tlt.vllm_worker.empty_rows"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).empty_rows
    sys.modules.pop(name)


@pytest.mark.parametrize("width", [5, 4096, 4097, 9000])
def test_chosen_rows_are_emptied_and_no_other_is_touched(empty_rows, width):
    values = torch.rand(6, width)
    values[[1, 4]] = torch.nan
    sound = values.clone()
    empty_rows(values, values[:, 0].isnan())
    assert not values[[1, 4]].any()
    assert torch.equal(values[[0, 2, 3, 5]], sound[[0, 2, 3, 5]])
