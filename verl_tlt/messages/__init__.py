"""Records that cross a process border, as frozen dataclasses.

Ray pickles them as they are. vLLM's RPC and JSON carry plain values only: there the sender uses `to_plain` and the
receiver `from_plain`, and no other code sees a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def to_plain(record: DataclassInstance) -> dict[str, Any]:
    """A record as nested dicts and tuples, which JSON and vLLM's RPC can carry."""
    return asdict(record)


def from_plain(kind: type[T], plain: Mapping[str, Any]) -> T:
    """The record again, also after JSON, which makes strings of integer keys and lists of tuples.

    Raises:
        pydantic.ValidationError: a field is missing or of another type.
    """
    from pydantic import TypeAdapter  # here: most readers of these records need no pydantic

    return TypeAdapter(kind).validate_python(plain)
