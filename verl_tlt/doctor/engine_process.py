"""The child process of `doctor.standalone_engine`: starts the recipe's engines and answers what they told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from verl_tlt.child_engine import serve_job
from verl_tlt.doctor.engine_check import check
from verl_tlt.doctor.standalone_engine import EngineJob, read_setup


def _work(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    job = EngineJob(**asked)
    return asyncio.run(check(job, read_setup(job), directory))


if __name__ == "__main__":
    serve_job(_work)
