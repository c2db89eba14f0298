"""How a benchmark keeps its figures: beside the machine, its CPU flags and the commit that they hold for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import machine


def store(file: Path, figures: Mapping[str, Any]) -> None:
    """Replace `file` by the figures and what they were measured on."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
