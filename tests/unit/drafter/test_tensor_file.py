"""Safetensors files are read and not mapped: what a file holds, what is refused, and a file that becomes shorter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_tlt.drafter.tensor_file import TensorFile
from verl_tlt.errors import DrafterError

TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64,
)  # fmt: skip


def test_tensors_of_every_type_and_shape_are_what_safetensors_reads(tmp_path):
    tensors = {str(t): (torch.arange(6).reshape(2, 3) % 2).to(t) for t in TYPES}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    with TensorFile(tmp_path / "file") as reader:
        assert set(reader.names) == tensors.keys() and reader.metadata == {"format": "pt"}
        for name, tensor in load_file(tmp_path / "file").items():
            found = reader.get_tensor(name)
            assert found.dtype == tensor.dtype == reader.dtype(name) and list(found.shape) == reader.header(name).shape
            assert bytes(found.contiguous().view(-1).view(torch.uint8)) == bytes(tensor.view(-1).view(torch.uint8))
        assert np.array_equal(reader.get_array("torch.int64"), [[0, 1, 0], [1, 0, 1]])


def written(path, header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensor(kind="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": kind, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[]", b"{}", b"\xff\xff", b"[" * 5000, {"a": 3}, {"a": {}}, {"a": tensor(), "__metadata__": 3},
        {"a": tensor(), "__metadata__": ["x"]}, {"a": tensor(), "__metadata__": {"state": 3}},
        {"a": tensor(shape=(3,))}, {"a": tensor(shape=(-2,), offsets=(8, 0))}, {"a": tensor(shape=(2.0,))},
        {"a": tensor(shape=(True, 2))}, {"a": tensor(offsets=(0, 16))}, {"a": tensor(offsets=(8, 16))},
        {"a": tensor(offsets=(-8, 0))}, {"a": tensor(offsets=(0,))}, {"a": tensor(offsets=None)},
        {"a": tensor(), "b": tensor()}, {"a": tensor(shape=(1,), offsets=(0, 4))}, {"a": tensor(shape=(10**30,))},
        {"a": tensor("F4", (16,), (8, 0))},
    ],
)  # fmt: skip
def test_a_header_that_is_none_is_one_sentence(tmp_path, header):
    file = written(tmp_path / "file", header)
    with pytest.raises(DrafterError, match=f"^{file} is no complete safetensors file: .+") as error:
        TensorFile(file)
    assert "\n" not in str(error.value)


def test_what_is_no_file_of_tensors_is_one_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "short").write_bytes(b"\1\0\0")
    (tmp_path / "long").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    said_of = {"nowhere": "does not exist", "pipe": "no ordinary", ".": ".", "short": "has 3 bytes", "long": "header"}
    for name, said in said_of.items():
        with pytest.raises(DrafterError, match=said):
            TensorFile(tmp_path / name)
    file = written(tmp_path / "type", {"a": tensor("F4", (16,))})
    with TensorFile(file) as reader, pytest.raises(DrafterError, match="holds F4"):
        reader.get_tensor("a")


READ = """
import os, sys
from pathlib import Path
from verl_tlt.drafter.tensor_file import TensorFile
file = Path(sys.argv[1])
with TensorFile(file) as reader:
    kept = reader.get_array("a")
    os.truncate(file, 4096)
    try:
        reader.get_array("b")
    except ValueError as error:
        print(int(kept.sum()), error)
"""


def test_a_file_that_becomes_shorter_ends_nobody_and_changes_nothing_that_was_read(tmp_path):
    file = tmp_path / "file"
    save_file({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, file)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(file)], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done
    assert done.stdout == f"{1 << 20} {file} is no complete safetensors file: it became shorter while it was read.\n"
