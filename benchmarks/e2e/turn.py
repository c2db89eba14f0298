"""One turn of one arm: its job goes on from its last checkpoint for some steps, and ends."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.e2e.arms import SPECULATIVE, Arm
from benchmarks.e2e.pooled import Step, read_step
from benchmarks.toy_job import FORCED, SAMPLES, Job
from demo.machine import find_dtype
from demo.toy.assets import Assets

PROMPTS = 6
"""Of a step."""
OVERRIDES = (f"data.train_batch_size={PROMPTS}", "trainer.max_actor_ckpt_to_keep=1")
STATS = ("actor_rollout_ref.rollout.disable_log_stats=False",)
LOGGED = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "5"}
"""verl keeps vLLM's log at warnings unless told otherwise."""
LOOK_S = 2.0
STALL_S = 900.0
ACCEPTED = re.compile(r"Mean acceptance length: ([\d.]+), .*?Accepted: (\d+) tokens")


@dataclass(frozen=True)
class Turn:
    """What a turn measured."""

    steps: list[Step]
    """All but its first, in which everything is used for the first time."""
    seconds: float
    """From the start of the job to its end."""
    accept_length: float | None
    """Of stock verl with vLLM's speculation: vLLM's log over the whole turn."""


def take(arm: Arm, turn: int, steps: int, assets: Assets, home: Path, forced: bool) -> Turn:
    """Run turn number `turn` (from 0 on) of `arm` in its folder `home`, with `forced` at given lengths and replicas.

    Raises:
        RuntimeError: the job failed, or wrote nothing for a quarter of an hour.
    """
    began, metrics = time.monotonic(), home / f"metrics-{turn}.jsonl"
    logs = SPECULATIVE in "".join(arm.overrides)
    given = (FORCED, f"actor_rollout_ref.rollout.router_config_path={assets.router}") if forced else ()
    if forced and arm.tlt:  # so that a turn has steps without drafts to compare with; a long run has them anyway
        given = (*given, f"tlt.speculation.control_every={steps // 2}")
    job = Job(
        home, assets, steps * (turn + 1), (*OVERRIDES, *given, *(STATS if logs else ()), *arm.overrides),
        TLT=str(int(arm.tlt)), DRAFTER=str(arm.drafter or ""), DTYPE=find_dtype(), RESUME="auto",
        SAVE_FREQ=str(steps), VERL_FILE_LOGGER_PATH=str(metrics),
        **(LOGGED if logs else {}),
    )  # fmt: skip
    try:
        size, changed = 0, began
        while (code := job.tree.process.poll()) is None:
            job.processes()
            if job.log.stat().st_size != size:
                size, changed = job.log.stat().st_size, time.monotonic()
            if time.monotonic() - changed > STALL_S:
                raise RuntimeError(f"{arm.name} has written nothing for {STALL_S:.0f} s; see {job.log}")
            time.sleep(LOOK_S)
        said = job.said()
    finally:
        job.end()
    if code:
        raise RuntimeError(f"{arm.name} failed with exit status {code}; see {job.log}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [read_step(turn, row["step"], row["data"], PROMPTS * SAMPLES) for row in rows[1:]]
    if len(found) != steps - 1:
        raise RuntimeError(f"{arm.name} ended after {len(rows)} of {steps} steps; see {job.log}")
    return Turn(found, time.monotonic() - began, accepted(said.splitlines()))


def accepted(lines: Iterable[str]) -> float | None:
    """The accept length that vLLM logged for intervals, as one; None: nothing was drafted."""
    tokens = drafts = 0.0
    for line in lines:
        if (match := ACCEPTED.search(line)) and float(match[1]) > 1:
            tokens += int(match[2])
            drafts += int(match[2]) / (float(match[1]) - 1)
    return 1 + tokens / drafts if drafts else None
