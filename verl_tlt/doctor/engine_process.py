"""The child process of `doctor.standalone_engine`: starts the recipe's engine, does one task, answers what it found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_tlt.child_engine import serve_job
from verl_tlt.doctor.engine_check import check
from verl_tlt.doctor.standalone_engine import EngineJob, Setup, measure_costs, read_setup, start
from verl_tlt.server.calibration import cost_key

Task = Callable[[EngineJob, Setup, Path], Awaitable[dict[str, Any]]]


async def _calibrate(job: EngineJob, setup: Setup, directory: Path) -> dict[str, Any]:
    begin = time.perf_counter()
    async with start(setup, directory) as engine:
        table = await measure_costs(engine, job.budget_s)
        drafter = None if setup.tlt.speculation.source == "ngram" else engine.drafter
        key = asdict(cost_key(setup.policy, setup.rollout, drafter))
    return {"latency": {str(k): v for k, v in table.items()}, "key": key, "seconds": time.perf_counter() - begin}


def _work(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    job = EngineJob(**asked)
    tasks: dict[str, Task] = {"calibrate": _calibrate, "check": check}

    async def work() -> dict[str, Any]:
        return await tasks[job.task](job, read_setup(job), directory)

    return asyncio.run(work())


if __name__ == "__main__":
    serve_job(_work)
