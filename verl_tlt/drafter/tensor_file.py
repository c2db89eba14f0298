"""Finds the file of each tensor of a model, and reads safetensors files that others may have written, or change now.

Nothing is mapped: the kernel ends a process (SIGBUS) that reads a mapped page behind the end of a file which has become
shorter. Header and tensors are copied into the process's own memory, and checked there.

A drafter's tensors have a name in each layout:

speculators, and our files    layers.0.self_attn.q_proj.weight
SafeAILab/EAGLE, SpecForge    midlayer.self_attn.q_proj.weight
vLLM, live                    model.layers.0.self_attn.qkv_proj.weight: q, k and v stacked, as are gate and up
MTP head, in a checkpoint     mtp.layers.0.* (Qwen3.5), model.mtp_layers.0.* (MiMo; live behind the policy's L layers,
                              the decoder layer as model.mtp_layers.L.mtp_block.*)
its experts                   *.experts.gate_up_proj and down_proj; live *.experts.routed_experts.w13_weight, w2_weight
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verl_tlt.drafter.policy import Model, folder, read_json
from verl_tlt.errors import DrafterError
from verl_tlt.files.json_files import open_ordinary, parse

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")
_BESIDE = re.compile(r"[^/\0]+\.safetensors")
"""Names of the files that an index may speak of."""
_MOST_HEADER = 100_000_000
"""Most bytes of a header: the format's own bound."""
_TYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "I64": ("int64", 8), "I32": ("int32", 4),
    "I16": ("int16", 2), "I8": ("int8", 1), "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2),
    "U8": ("uint8", 1), "BOOL": ("bool", 1), "F8_E8M0": ("float8_e8m0fnu", 1), "C64": ("complex64", 8),
}  # fmt: skip
"""The format's types: what numpy and torch call them, and their bytes."""
_MIMO = re.compile(r"^mtp_layers\.\d+\.(?:mtp_block\.)?")
_STACKED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
_EXPERTS = {
    "experts.routed_experts.": "experts.",
    "experts.gate_up_proj": "experts.w13_weight",
    "experts.down_proj": "experts.w2_weight",
}
"""Parts of names that vLLM spells differently; some releases have no `routed_experts`."""
FLOATS = ("F32", "F16", "BF16")
"""Types of a drafter's weights."""


class Header(NamedTuple):
    """One tensor's entry in the header of a safetensors file."""

    file: Path
    name: str
    shape: list[int]
    kind: str  # its dtype, such as "BF16"
    begin: int  # of its bytes in the file, behind the header
    end: int

    def must_be(self, shape: list[int], config: str, kinds: Sequence[str] = ()) -> None:
        """Raise a `DrafterError` where the shape is not what `config` asks for, or the dtype is none of `kinds`."""
        if self.shape != shape:
            raise DrafterError(f"{self.file}: {self.name} is {self.shape}, but {config} asks for {shape}.")
        if kinds and self.kind not in kinds:
            raise DrafterError(f"{self.file}: {self.name} holds {self.kind}, but must hold {' or '.join(kinds)}.")


class TensorFile(AbstractContextManager["TensorFile"]):
    """An open safetensors file, for a `with` block; a `DrafterError` where it is none, or becomes shorter meanwhile."""

    def __init__(self, file: Path) -> None:
        self._name = file
        try:
            self._file = open_ordinary(file)
        except FileNotFoundError:
            raise DrafterError(f"{file} does not exist.") from None
        except OSError as error:
            raise self._broken(error) from error
        try:
            self._start, self.metadata, self._entries = self._header()
        except DrafterError:
            self._file.close()
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._file.close()
            raise self._broken(error) from error

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def header(self, name: str) -> Header:
        return self._entries[name]

    def dtype(self, name: str) -> torch.dtype:
        import torch

        return getattr(torch, self._type(name))

    def get_tensor(self, name: str) -> torch.Tensor:
        import torch

        shape = self._entries[name].shape
        if not (content := self._content(name)).size:  # of which torch makes no view
            return torch.empty(shape, dtype=self.dtype(name))
        return torch.from_numpy(content).view(self.dtype(name)).reshape(shape)

    def get_array(self, name: str) -> np.ndarray:
        """One tensor for numpy, without torch."""
        return self._content(name).view(self._type(name)).reshape(self._entries[name].shape)

    def _content(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        self._type(name)  # a type that is not known is refused before its bytes are read
        return self._bytes(self._start + entry.begin, entry.end - entry.begin)

    def _type(self, name: str) -> str:
        kind = self._entries[name].kind
        if kind not in _TYPES:
            raise DrafterError(f"{self._name}: {name} holds {kind}, which is not read.")
        return _TYPES[kind][0]

    def _header(self) -> tuple[int, dict[str, str], dict[str, Header]]:
        """(offset of the first tensor, metadata of the file, header of each tensor), all of it checked."""
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        length = int(self._bytes(0, 8).view("<u8")[0])
        if not 2 <= length <= min(size - 8, _MOST_HEADER):
            raise ValueError(f"its header would have {length} bytes")
        table = parse(self._bytes(8, length).tobytes())
        metadata = dict(table.pop("__metadata__", None) or {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata is no text")
        entries = {name: _entry(self._name, name, fields) for name, fields in table.items()}
        end = 0  # tensors follow each other without a gap
        for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
            if entry.begin != end:
                raise ValueError("its tensors overlap or leave gaps")
            end = entry.end
        if end != size - 8 - length:
            raise ValueError(f"it has {size} bytes, and its header speaks of {8 + length + end}")
        return 8 + length, metadata, entries

    def _bytes(self, offset: int, count: int) -> np.ndarray:
        """uint8 [count], in this process's memory."""
        raw, done = np.empty(count, np.uint8), 0
        try:
            while done < count:
                if not (read := os.preadv(self._file.fileno(), [raw[done:].data], offset + done)):
                    raise self._broken("it became shorter while it was read")
                done += read
        except OSError as error:
            raise self._broken(error) from error
        return raw

    def _broken(self, why: object) -> DrafterError:
        return DrafterError(f"{self._name} is no complete safetensors file: {why}.")


def _entry(file: Path, name: str, fields: dict[str, Any]) -> Header:
    kind, shape, (begin, end) = str(fields["dtype"]), list(fields["shape"]), fields["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name} has a size or a place that is no whole number")
    if kind in _TYPES and math.prod(shape) * _TYPES[kind][1] != end - begin:
        raise ValueError(f"{name} is said to be {shape} of {kind} in {end - begin} bytes")
    return Header(file, name, shape, kind, begin, end)


def read_tensors(entries: Mapping[str, Header]) -> dict[str, torch.Tensor]:
    """The tensors of these headers, on the host; a `DrafterError` where one holds NaN or infinity."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        with TensorFile(file) as reader:
            tensors |= {name: reader.get_tensor(entry.name) for name, entry in entries.items() if entry.file == file}
    if (broken := not_finite(tensors)) is not None:
        raise DrafterError(f"{entries[broken].file}: {entries[broken].name} holds NaN or infinity.")
    return tensors


def not_finite(tensors: Mapping[str, torch.Tensor], device: torch.device | None = None) -> str | None:
    """Name of the first tensor with NaN or infinity, sought on `device` or where it is; None: all are finite."""
    numbers = ((name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point())
    return next((name for name, tensor in numbers if not tensor.to(device).isfinite().all()), None)


def plain(name: str) -> str:
    """A tensor's name in speculators' layout; what vLLM stacked stays so, and an MTP head has no prefix."""
    name = _MIMO.sub("mtp_layers.0.", name.removeprefix("model.").removeprefix("mtp."))
    return name.replace("midlayer.", "layers.0.")


def stacked(name: str) -> str:
    """The plain name of vLLM's tensor that holds this one; the same for all tensors that vLLM stacks in it."""
    name = plain(name).replace("draft_id_to_target_id", "d2t")
    for pattern, stack in _STACKED:
        name = pattern.sub(stack, name)
    for part, live in _EXPERTS.items():
        name = name.replace(part, live)
    return name


def tensor_files(model: Model, fetch: bool = True) -> tuple[Path, dict[str, str]]:
    """(the file that lists a model's tensors, the file of each by the tensor's name); else a `DrafterError`.

    As in transformers a single file comes before an index; the index counts besides if it names that file.
    """
    directory = folder(model, (WEIGHTS, INDEX), fetch=fetch)
    single, index = directory / WEIGHTS, directory / INDEX
    if not single.is_file() and not index.is_file() and (pickle := pickled(directory)):
        raise DrafterError(
            f"{directory / pickle} is pickled, which can run code when it is read; if you trust it, write {WEIGHTS} "
            "beside it, with save_file of safetensors.torch or save_pretrained of transformers."
        )
    owners = _index(index) if index.is_file() else {}
    if owners and not single.is_file():
        return index, owners
    with TensorFile(single) as reader:
        own = dict.fromkeys(reader.names, WEIGHTS)
    return (index, {**owners, **own}) if WEIGHTS in owners.values() else (single, own)


def pickled(directory: Path) -> str | None:
    return min((file.name for pattern in _PICKLES for file in directory.glob(pattern)), default=None)


def _index(file: Path) -> dict[str, str]:
    table = read_json(file).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise DrafterError(f"{file}: weight_map must say which file each tensor is in, not {str(table)[:80]}.")
    for name, owner in table.items():
        if not isinstance(owner, str) or not _BESIDE.fullmatch(owner):
            raise DrafterError(f"{file}: {name} is said to be in {owner!r}, which is no safetensors file beside it.")
    return table


def headers(model: Model, listing: Path, owners: Mapping[str, str], fetch: bool = True) -> dict[str, Header]:
    """Headers of these tensors of a model by name; `owners`: the file of each by its name, as `listing` says."""
    entries = {}
    for file in sorted(set(owners.values())):
        path = folder(model, (file,), fetch=fetch) / file
        with TensorFile(path) as reader:
            names = set(reader.names)
            for name in (name for name, owner in owners.items() if owner == file):
                if name not in names:
                    raise DrafterError(f"{path} has no tensor {name!r}, which {listing} says it has.")
                entries[name] = reader.header(name)
    return entries
