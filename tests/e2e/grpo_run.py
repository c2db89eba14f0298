"""One real GRPO run: stock `main_ppo`, Ray, FSDP2 and vLLM replicas on the CPU, in fp32, from the demo's recipe.

Response lengths are forced, so that a replica runs dry long before another. Draft lengths are fixed, so acceptance is
measured from the first step on.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet as pq

from benchmarks.toy_job import CONSTANT
from tests.toy.assets import build_assets
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.commands.processes import ProcessTree
from verl_tlt.commands.report.reader import RunTrace, read_trace

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "demo" / "demo_grpo.sh"
BATCH, LONG, SHORT = 8, 600, 80  # prompts a step, of two responses each
LIMIT_S = 1500.0
"""Six times what a run takes on a slow machine: a hang ends here, with everybody's stack in the log."""


Cores = Mapping[int, tuple[int, ...]]


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
    cores: Cores
    """Cores on which each process could run when it was last seen, by process id."""

    def cores_of(self, name: str) -> list[tuple[int, ...]]:
        """Those of each process whose lines in the log begin with this name, sorted."""
        said = re.findall(rf"\({name} pid=(\d+)", re.sub(r"\x1b\[[0-9;]*m", "", self.log))
        return sorted(self.cores[pid] for pid in set(map(int, said)))


def skew(path: Path, long: Callable[[int], bool], longest: int) -> None:
    """Rewrite the prompts' forced lengths: one of `longest` tokens where `long(index)`, everything else short."""
    rows = pq.read_table(path).to_pylist()
    for i, row in enumerate(rows):
        lengths = [SHORT + 3 * k for k in range(len(row["extra_info"]["forced_lengths"]))]
        if long(i):
            lengths[0] = longest
        row["extra_info"]["forced_lengths"] = lengths
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(rows), path)


@interruptible()  # a time limit on the tests ends them with SIGTERM
def finish(command: list[str], env: dict[str, str], log: Path, timeout: float) -> tuple[list[str], Cores]:
    """Run a command to its end, or fail with the last lines of its log; returns what outlived it, and `Run.cores`.

    One that takes too long is asked where it stands (faulthandler, into the log) before it is ended.
    """
    tree = ProcessTree(command, env=env | {"PYTHONFAULTHANDLER": "1"}, log=log, cwd=log.parent)
    cores: dict[int, tuple[int, ...]] = {}
    try:
        deadline = time.time() + timeout
        while tree.process.poll() is None and time.time() < deadline:
            tree.alive()
            for process in psutil.process_iter():  # a fork of the tests' own server is in nobody's tree
                with contextlib.suppress(psutil.Error):  # it has just ended
                    cores[process.pid] = tuple(process.cpu_affinity())
            time.sleep(1)
        if tree.process.poll() is None:
            for process in tree.alive():
                if process.pid != tree.process.pid and "ray::" in process.name():
                    process.send_signal(signal.SIGABRT)
            time.sleep(2)
        settled = time.time() + 20
        while (alive := tree.alive()) and tree.process.poll() is not None and time.time() < settled:
            time.sleep(0.2)
        left = [p.name() for p in alive]
    finally:
        tree.stop()
    last = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
    assert tree.process.returncode == 0, f"ended with {tree.process.returncode} (limit {timeout} s):\n{last}"
    return left, cores


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
    built = build_assets(assets, width="small", train_rows=64, val_rows=8)
    skew(built.train, long, longest)
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OUT": str(out),
        "ASSETS": str(assets),
        "POLICY": str(built.policy),
        "STEPS": str(steps),
        "DTYPE": "float32",
        "EXECUTOR": "mp",
        **environment,
    }
    command = [
        str(RECIPE),
        f"data.train_batch_size={BATCH}",
        "data.shuffle=False",
        "data.max_response_length=640",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.max_model_len=720",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={built.agent_loop}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forced_length",
        *overrides,
    ]
    log = out.with_name(f"{out.name}.log")
    left, cores = finish(command, env, log, LIMIT_S)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trace = read_trace(out / "trace") if env.get("TLT") != "0" else RunTrace(out / "trace")
    return Run(out, {line["step"]: line["data"] for line in lines}, trace, log.read_text(), left, cores)


TLT = (
    "tlt.speculation.policy=fixed",
    "tlt.speculation.fixed=2",
    "tlt.drafter.learning_rate=2e-3",
    f"{CONSTANT}.drafter.warmup_steps=5",
    f"{CONSTANT}.drafter.batch_tokens=512",
    f"{CONSTANT}.buffer.min_tokens=100",
    "tlt.spot.max_epochs=24",
    # By two steps' held-out prompts the gate judges.
    f"{CONSTANT}.buffer.held_out=0.45",
    f"{CONSTANT}.buffer.window=256",
)
