"""A training state as a safetensors file: tensors by their place in the state, everything else as JSON in the header.

`torch.save` would pickle it, and a pickle can run code when it is read; checkpoints lie where others may write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from verl_tlt.drafter.policy import Fields
from verl_tlt.errors import DrafterError

_HEADER = "state"
_TENSOR = "tensor"
"""A tensor's place in the JSON says its name: `{"tensor": "parameters/fc.weight"}`."""


def write_state(state: Mapping[str, object], file: Path) -> None:
    """Write nested mappings and lists of tensors and JSON values; tuples and keys that are numbers come back as lists
    and text.

    Raises:
        TypeError: a value that is neither.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    others = _without_tensors(state, (), tensors)
    save_file(tensors, file, metadata={_HEADER: json.dumps(others)})


def read_state(file: Path) -> Fields:
    """What `write_state` wrote, on the host.

    Raises:
        DrafterError: the file is damaged or holds something else.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as reader:
            return _with_tensors(json.loads((reader.metadata() or {})[_HEADER]), reader)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DrafterError(f"{file} is damaged, or no training state: {error}.") from error


def _without_tensors(value: object, place: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        name = "/".join(place)
        tensors[name] = value.contiguous()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _without_tensors(item, (*place, str(key)), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, (*place, str(i)), tensors) for i, item in enumerate(value)]
    return value


def _with_tensors(value: Any, reader: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR} and isinstance(value[_TENSOR], str):
            return reader.get_tensor(value[_TENSOR])
        return {key: _with_tensors(item, reader) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_tensors(item, reader) for item in value]
    return value
