"""One real GRPO run: stock `main_ppo`, Ray, FSDP2 and vLLM replicas on the CPU, in fp32, from the demo's recipe.

Response lengths are forced, so that a replica runs dry long before another. Draft lengths are fixed, so acceptance is
measured from the first step on.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.toy_job import CONSTANT, FORCED, QUICK_TO_LEARN, Job, make_assets
from tests.toy.assets import FORCED_LENGTHS
from verl_tlt.commands.compare.job import read_rows
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.commands.report.reader import RunTrace, read_trace

BATCH, LONG, SHORT = 8, 600, 80  # prompts a step, of two responses each
LIMIT_S = 1500.0
"""Six times what a run takes on a slow machine: a hang ends here, with everybody's stack in the log."""
TLT = (
    *QUICK_TO_LEARN,
    f"{CONSTANT}.buffer.min_tokens=100",
    "tlt.drafter.learning_rate=2e-3",
    "tlt.spot.max_epochs=24",
    # By two steps' held-out prompts the gate judges.
    f"{CONSTANT}.buffer.held_out=0.45",
    f"{CONSTANT}.buffer.window=256",
)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    out: Path
    steps: dict[int, dict[str, float]]
    """verl's own metrics by step, from its `file` logger."""
    trace: RunTrace
    log: str
    left: list[str]
    """Processes that were still there some seconds after the run, and had to be ended."""
    cores: Mapping[int, tuple[int, ...]]
    """Cores on which each process could run when it was last seen, by process id."""

    def cores_of(self, name: str) -> list[tuple[int, ...]]:
        """Those of each process whose lines in the log begin with this name, sorted."""
        said = re.findall(rf"\({name} pid=(\d+)", re.sub(r"\x1b\[[0-9;]*m", "", self.log))
        return sorted(self.cores[pid] for pid in set(map(int, said)))


def one_long(index: int, long: Callable[[int], bool], longest: int) -> list[int]:
    """Of a prompt's responses all are short, but for the first one where `long(index)`."""
    lengths = [SHORT + 3 * k for k in range(FORCED_LENGTHS)]
    return [longest, *lengths[1:]] if long(index) else lengths


@interruptible()  # a time limit on the tests ends them with SIGTERM
def grpo(
    out: Path,
    assets: Path,
    steps: int,
    *overrides: str,
    long: Callable[[int], bool] = lambda index: index % BATCH == 0,
    longest: int = LONG,
    **environment: str,
) -> Run:
    """Run the demo's recipe, scaled down, to its end."""
    made = make_assets(assets, lambda index: one_long(index, long, longest))
    options = (
        FORCED,
        f"data.train_batch_size={BATCH}",
        "data.max_response_length=640",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.max_model_len=720",
        "actor_rollout_ref.rollout.max_num_seqs=16",
    )
    environment = {"EXECUTOR": "mp", "PYTHONFAULTHANDLER": "1", **environment}
    cores: dict[int, tuple[int, ...]] = {}

    def look() -> None:
        for process in psutil.process_iter():  # a fork of the tests' own server is in nobody's tree
            with contextlib.suppress(psutil.Error):  # it has just ended
                cores[process.pid] = tuple(process.cpu_affinity())

    job = Job(out, made, steps, (*options, *overrides), **environment)
    try:
        status = job.wait(LIMIT_S, look)
        ended = [] if status is None else job.left()
    finally:
        job.end()
    left = [what for what in ended if what.startswith("process ")]  # forks leave files, too
    said = job.said()
    last = "\n".join(said.splitlines()[-60:])
    assert status == 0, f"ended with {status} (None: not within {LIMIT_S} s):\n{last}"
    trace = read_trace(out / "trace") if environment.get("TLT") != "0" else RunTrace(out / "trace")
    return Run(out, read_rows(out / "metrics.jsonl"), trace, said, left, cores)
