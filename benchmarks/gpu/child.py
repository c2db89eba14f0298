"""The process of one part of `benchmarks.gpu`."""

import asyncio
import importlib
import inspect
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Bench, Part
from verl_tlt.commands.child_engine import serve_job


def _work(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    part: Part = importlib.import_module(asked["module"]).PARTS[asked["part"]]
    answer = part.work(Bench(asked["tiny"], directory))
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


if __name__ == "__main__":
    serve_job(_work)
