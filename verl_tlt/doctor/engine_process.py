"""The child process of `doctor.standalone_engine`: starts the recipe's engine, does one task, writes its findings.

`python -m verl_tlt.doctor.engine_process DIRECTORY`, where the directory holds `job.json`; `answer.json` is the answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_tlt.config import TLTConfigError
from verl_tlt.doctor.engine_check import check
from verl_tlt.doctor.standalone_engine import EngineJob, Setup, measure_costs, read_setup, start
from verl_tlt.server.calibration import cost_key

Task = Callable[[EngineJob, Setup], Awaitable[dict[str, Any]]]


async def _calibrate(job: EngineJob, setup: Setup) -> dict[str, Any]:
    begin = time.perf_counter()
    async with start(setup, Path(job.directory)) as engine:
        table = await measure_costs(engine, job.budget_s)
        drafter = None if setup.tlt.speculation.source == "ngram" else engine.drafter
        key = asdict(cost_key(setup.policy, setup.rollout, drafter))
    return {"latency": {str(k): v for k, v in table.items()}, "key": key, "seconds": time.perf_counter() - begin}


def _main(directory: Path) -> None:
    job = EngineJob(**json.loads((directory / "job.json").read_text()))
    tasks: dict[str, Callable[[EngineJob, Setup], Awaitable[dict[str, Any]]]] = {
        "calibrate": _calibrate,
        "check": check,
    }

    async def work() -> dict[str, Any]:
        return await tasks[job.task](job, read_setup(job))

    try:
        found = asyncio.run(work())
    except TLTConfigError as error:
        found = {"refused": str(error)}
    (directory / "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with its parent, and vLLM's children with it
    _main(Path(sys.argv[1]))
