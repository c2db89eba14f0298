"""A training state comes back to the bit, and holds nothing that could run."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from verl_tlt.drafter import DrafterError
from verl_tlt.drafter.checkpoint import read_state, write_state


def test_it_comes_back_to_the_bit(tmp_path):
    rng = np.random.default_rng(5).bit_generator.state
    state = {
        "parameters": {"fc.weight": torch.randn(3, 4).t(), "half": torch.randn(2).bfloat16()},
        "moments": [{"step": torch.tensor(3.0)}, {"step": torch.tensor(4, dtype=torch.int64)}],
        "groups": [{"lr": 1e-3, "fused": None, "amsgrad": False}],
        "rng": rng, "loss": float("inf"), "name": "tensor", "empty": {},
    }  # fmt: skip
    write_state(state, tmp_path / "s")
    found = read_state(tmp_path / "s")
    assert list(found) == list(state)
    for name, value in state["parameters"].items():
        assert found["parameters"][name].dtype == value.dtype and torch.equal(found["parameters"][name], value)
    for one, two in zip(found["moments"], state["moments"], strict=True):
        assert torch.equal(one["step"], two["step"]) and one["step"].dtype == two["step"].dtype
    rest = ("groups", "rng", "loss", "name", "empty")
    assert [found[key] for key in rest] == [state[key] for key in rest]
    with safe_open(tmp_path / "s", framework="pt") as reader:
        assert set(reader.keys()) == {"parameters/fc.weight", "parameters/half", "moments/0/step", "moments/1/step"}


def test_what_is_no_number_or_text_is_not_written(tmp_path):
    with pytest.raises(TypeError):
        write_state({"call": print}, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_what_is_no_state_is_named(tmp_path):
    file = tmp_path / "s"
    write_state({"a": torch.zeros(100)}, file)
    for content in (file.read_bytes()[:-4], b"", b"\x80\x04pickled"):
        file.write_bytes(content)
        with pytest.raises(DrafterError, match=f"^{file} is damaged, or no training state"):
            read_state(file)
    for header in (None, {"state": "{"}, {"state": json.dumps({"a": {"tensor": "elsewhere"}})}):
        save_file({"a": torch.zeros(1)}, file, metadata=header)
        with pytest.raises(DrafterError, match="is damaged, or no training state"):
            read_state(file)
