"""Every symbol of verl and vLLM that verl-tlt touches, by our file that does, with the signature it relies on.

A release number says little about a function that begins with an underscore. So what is used is listed in
`symbols.yaml`. `upstream.sources` looks it up in a release's source text, and a test compares the list with our
imports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

_ROW = re.compile(r"([^\s(]+)(?:\((.*)\))?(?: has (.*?))?(?: moved_to (.*))?")


@dataclass(frozen=True)
class Symbol:
    """Something of verl's or vLLM's that our code calls, overrides, replaces or reads."""

    name: str  # `module:qualified.name`; for a module itself, `module:`
    takes: str = ""
    """Names of the first parameters, in order, `self` left out; space-separated like the next one."""
    has: str = ""  # names that the class or module must define; its bases within the package count
    says: tuple[str, ...] = ()  # fragments that its source must contain, where we rely on how it is written
    moved_to: str = ""  # where a later release defines it, if it is not handed on to the module in `name`
    used_by: str = ""  # our file, below the package that lists it (`by_file`)

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


def by_file(users: Mapping[str, Sequence[Symbol]]) -> tuple[Symbol, ...]:
    """The symbols of a list by file, each with that file as its `used_by`."""
    return tuple(replace(symbol, used_by=file) for file, symbols in users.items() for symbol in symbols)


def _symbol(row: str | dict[str, list[str]]) -> Symbol:
    """One row of `symbols.yaml`, which says how it is written."""
    text, says = next(iter(row.items())) if isinstance(row, dict) else (row, ())
    if (found := _ROW.fullmatch(text)) is None:
        raise ValueError(f"symbols.yaml: {text} is no symbol.")
    name, takes, has, moved_to = (part or "" for part in found.groups())
    return Symbol(name if ":" in name else f"{name}:", takes, has, tuple(says), moved_to)


_LISTED = yaml.safe_load(Path(__file__).with_name("symbols.yaml").read_text())
SYMBOLS = by_file({file: [_symbol(row) for row in rows] for file, rows in _LISTED.items()})
"""Everything outside the documented interfaces."""
