"""How a benchmark keeps its figures: beside the machine, its CPU flags and the commit that they hold for."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.gpu.parts import machine


def store(file: Path, figures: Mapping[str, Any], folders: Mapping[str, Path] = MappingProxyType({})) -> None:
    """Replace `file` by the figures and what they were measured on.

    Names stand for `folders` of this machine in it: inner folders come before outer ones.
    """
    text = json.dumps({"machine": machine(), **figures}, indent=1)
    for name, folder in folders.items():
        text = text.replace(json.dumps(str(folder))[1:-1], name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")
