"""Reads safetensors files that others may have written, or may change now, without mapping them.

A process that reads a mapped page behind the end of a file which has become shorter is ended by the kernel (SIGBUS),
and an engine with it. Here header and tensors are copied into the process's own memory, and judged there. "np" needs no
torch.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np

from verl_tlt.errors import DrafterError
from verl_tlt.files.json_files import open_ordinary, parse

if TYPE_CHECKING:
    import torch

_MOST_HEADER = 100_000_000
"""Bytes of a header: the format's own bound."""
_TYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "I64": ("int64", 8), "I32": ("int32", 4),
    "I16": ("int16", 2), "I8": ("int8", 1), "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2),
    "U8": ("uint8", 1), "BOOL": ("bool", 1), "F8_E8M0": ("float8_e8m0fnu", 1), "C64": ("complex64", 8),
}  # fmt: skip
"""The format's types: what numpy and torch call them, and their bytes."""


class Entry(NamedTuple):
    """What a header says of one tensor."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """An open safetensors file; a `DrafterError` where it is none, or becomes shorter while it is read.

    Used in a `with` block, which closes it.
    """

    def __init__(self, file: Path, framework: Literal["pt", "np"]) -> None:
        self._name, self._framework = file, framework
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._entries)

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor."""
        return list(self._entries[name].shape)

    def kind(self, name: str) -> str:
        """Type of a tensor as the format calls it, such as "BF16"."""
        return self._entries[name].kind

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor as torch calls it."""
        import torch

        found: torch.dtype = getattr(torch, self._type(name))
        return found

    def get_tensor(self, name: str) -> Any:
        """A tensor, or with "np" an array, in this process's memory."""
        entry, kind = self._entries[name], self._type(name)
        found: Any
        if self._framework == "np":
            found = np.empty(entry.shape, kind)
            raw = found.reshape(-1).view(np.uint8)
        else:
            import torch

            found = torch.empty(entry.shape, dtype=getattr(torch, kind))
            raw = found.reshape(-1).view(torch.uint8).numpy() if found.numel() else np.empty(0, np.uint8)
        self._fill(raw, self._start + entry.begin)
        return found

    def _type(self, name: str) -> str:
        kind = self._entries[name].kind
        if kind not in _TYPES:
            raise DrafterError(f"{self._name}: {name} holds {kind}, which is not read.")
        return _TYPES[kind][0]

    def _header(self) -> tuple[int, dict[str, str], dict[str, Entry]]:
        """Where the tensors begin, the file's metadata, and what is said of each tensor; all of it is checked."""
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        first = np.empty(8, np.uint8)
        self._fill(first, 0)
        length = int(first.view("<u8")[0])
        if not 2 <= length <= min(size - 8, _MOST_HEADER):
            raise ValueError(f"its header would have {length} bytes")
        text = np.empty(length, np.uint8)
        self._fill(text, 8)
        said = parse(text.tobytes())
        metadata = dict(said.pop("__metadata__", None) or {})
        entries = {name: _entry(name, fields) for name, fields in said.items()}
        end = 0  # tensors follow each other without a gap
        for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
            if entry.begin != end:
                raise ValueError("its tensors overlap or leave gaps")
            end = entry.end
        if end != size - 8 - length:
            raise ValueError(f"it has {size} bytes, and its header speaks of {8 + length + end}")
        return 8 + length, metadata, entries

    def _fill(self, raw: np.ndarray, offset: int) -> None:
        """Read as many bytes as `raw` has room for."""
        done = 0
        try:
            while done < len(raw):
                if not (count := os.preadv(self._file.fileno(), [raw[done:].data], offset + done)):
                    raise self._broken("it became shorter while it was read")
                done += count
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, why: object) -> DrafterError:
        return DrafterError(f"{self._name} is no complete safetensors file: {why}.")


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    kind, shape, (begin, end) = str(fields["dtype"]), tuple(fields["shape"]), fields["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name} has a size or a place that is no whole number")
    if kind in _TYPES and math.prod(shape) * _TYPES[kind][1] != end - begin:
        raise ValueError(f"{name} is said to be {list(shape)} of {kind} in {end - begin} bytes")
    return Entry(kind, shape, begin, end)
