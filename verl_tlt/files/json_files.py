"""JSON that others may have written, read within limits: from an ordinary file, of so many bytes, so many levels deep.

Such a file may be a pipe that never ends, a device, larger than the memory, or nested until a reader's stack overflows.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from verl_tlt.errors import TLTError
from verl_tlt.files.ownership import open_descriptor

MOST_BYTES = 256 << 20
"""Most bytes of one file; the largest that are read are tokenizers, of some 30 MB."""
MOST_LEVELS = 32
"""Most lists and objects inside each other."""
_DECODER = json.JSONDecoder(parse_int=lambda text: int(text) if len(text.lstrip("-")) <= 18 else float(text))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JSONFileError(TLTError, ValueError):
    """A file that does not hold what is looked for; the message is a sentence that names it."""


def open_ordinary(path: str | os.PathLike[str]) -> BinaryIO:
    """An ordinary file to read; an OSError where it is none."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def read_lines(path: str | os.PathLike[str], longest: int = MOST_BYTES) -> Iterator[bytes]:
    """The lines of an ordinary file, ended by line feeds alone, in pieces of up to `longest` bytes; else an OSError."""
    with open_ordinary(path) as file:
        if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
            file.seek(0)
        while line := file.readline(longest):
            yield line


def parse(text: str | bytes) -> Any:
    """The value of a JSON text; a ValueError where there is none, it is too deep, or holds half a surrogate pair.

    A whole number of more than 18 digits is a float, which may be infinite: nobody counts so far.
    """
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = _DECODER.decode(text)
        deep = text.count("[") + text.count("{") > MOST_LEVELS and _deeper(value)
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")
    if _SURROGATE.search(text) and re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)):
        raise ValueError("a text in it holds half a surrogate pair, which is no character")
    return value


def _deeper(value: object) -> bool:
    level = [value] if isinstance(value, dict | list) else []  # those of one depth
    for _ in range(MOST_LEVELS):
        inside = (part.values() if isinstance(part, dict) else part for part in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
    return bool(level)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a `JSONFileError` where there is none."""
    try:
        with open_ordinary(path) as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MB")
        value = parse(text)
    except FileNotFoundError:
        raise JSONFileError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise JSONFileError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(value, dict):
        raise JSONFileError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value
