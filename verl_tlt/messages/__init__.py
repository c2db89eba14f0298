"""Records that cross a process border, as frozen dataclasses.

Ray pickles them as they are. vLLM's RPC and JSON carry plain values only: there the sender uses `dataclasses.asdict`
and the receiver `from_plain`, and no other code sees a dict.
"""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def from_plain(kind: type[T], plain: Mapping[str, object]) -> T:
    """Make a record of plain values, also after JSON made strings of integer keys; or `pydantic.ValidationError`."""
    from pydantic import TypeAdapter  # here: most readers of these records need no pydantic

    return TypeAdapter(kind).validate_python(plain)
