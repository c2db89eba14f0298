"""One GRPO run of the toy with faults armed, to its end: what it wrote, and what it left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.faults.plan import STEPS, Fault
from demo.toy.assets import build_assets
from verl_tlt.commands.compare.processes import ProcessTree, interruptible

ROOT = Path(__file__).parents[2]
BATCH, SAMPLES, LONG, SHORT = 4, 4, 400, 40
LIMIT_S = 3000.0
"""A run that takes longer hangs."""
SETTLE_S = 20.0
"""Ray's daemons end some seconds after the run."""

TLT = (
    "tlt.speculation.policy=fixed",
    "tlt.speculation.fixed=2",
    "tlt.drafter.learning_rate=2e-3",
    "tlt.drafter.intermediate_size=null",
    "tlt.drafter.warmup_steps=5",
    "tlt.drafter.batch_tokens=512",
    "tlt.buffer.min_tokens=300",
    "tlt.spot.max_epochs=30",
    "tlt.spot.min_merge_steps=2",
    "tlt.spot.stop_timeout_s=10",  # sessions get what time engines leave, which on a busy machine is little
    "tlt.gate.enable=false",  # every merge is published, and so every step loads another drafter
)


@dataclass(frozen=True)
class FaultRun:
    """A run that has ended."""

    out: Path
    status: int
    """Its exit status; -1: it was still running when the time was up."""
    seconds: float
    steps: dict[int, dict[str, float]]
    """verl's own metrics by step."""
    log: str
    fired: dict[str, int]
    """Files of faults that struck, with the step."""
    left: list[str] = field(default_factory=list)
    """What was still there when it had ended: processes, folders, shared memory."""


@interruptible()  # a time limit ends the run's processes, too
def run(
    name: str, out: Path, steps: int, faults: Sequence[Fault], *, tlt: bool = True, save_every: int = -1
) -> FaultRun:
    """Run the demo's recipe with these faults armed.

    Args:
        name: of the run, below `out`, where all runs share the prompts and the recorded responses.
        out: directory.
        steps: GRPO steps.
        faults: to be armed.
        tlt: False: stock verl.
        save_every: RL steps between checkpoints.
    """
    target, armed = out / name, out / f"{name}-armed"
    for old in (target, armed):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    (out / "recorded").mkdir(exist_ok=True)
    log, env, command = out / f"{name}.log", *_command(out, target, steps, tlt, save_every)
    env |= arm(armed, faults)
    log.unlink(missing_ok=True)
    begin = time.time()
    tree = ProcessTree(command, env=env, log=log, cwd=target)
    left: list[str] = []
    try:
        while tree.process.poll() is None and time.time() - begin < LIMIT_S:
            tree.alive()
            time.sleep(1)
        seconds, status = time.time() - begin, tree.process.poll()
        if status is None:
            _ask_where_it_stands(tree)
        else:
            left = _left(tree)
    finally:
        tree.stop()
    metrics = target / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return FaultRun(
        target,
        -1 if status is None else status,
        seconds,
        {line["step"]: line["data"] for line in lines},
        log.read_text(errors="replace"),
        fired(armed),
        left,
    )


def arm(folder: Path, faults: Sequence[Fault]) -> dict[str, str]:
    """Environment of a run that these faults strike; the folder is empty, and the run's own."""
    (folder / "plan").write_text(json.dumps({fault.name: fault.step for fault in faults}))
    inject = Path(__file__).parent / "inject"
    return {
        "PYTHONPATH": os.pathsep.join([str(inject), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TLT_FAULTS": str(folder),
    }


def fired(folder: Path) -> dict[str, int]:
    """Notes of the faults that have struck -> the step."""
    return {p.name.removeprefix("fired-"): int(p.read_text().split()[0]) for p in folder.glob("fired-*")}


def _command(out: Path, target: Path, steps: int, tlt: bool, save_every: int) -> tuple[dict[str, str], list[str]]:
    built = build_assets(out / "assets", width="small", train_rows=BATCH * STEPS, val_rows=8)
    _take_turns(built.train)
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONFAULTHANDLER": "1",
        "TLT_FAULTS_RECORDED": str(out / "recorded"),
        "OUT": str(target),
        "ASSETS": str(out / "assets"),
        "POLICY": str(built.policy),
        "AUX_LAYERS": ",".join(map(str, built.aux_layers)),
        "STEPS": str(steps),
        "SAVE_FREQ": str(save_every),
        "DTYPE": "float32",
        "TLT": "1" if tlt else "0",
    }
    command = [
        str(ROOT / "demo" / "demo_grpo.sh"),
        f"data.train_batch_size={BATCH}",
        "data.shuffle=False",
        f"data.max_response_length={LONG + 40}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        f"actor_rollout_ref.rollout.max_model_len={LONG + 120}",
        f"actor_rollout_ref.rollout.max_num_seqs={BATCH * SAMPLES}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={Path(__file__).with_name('agent_loop.yaml')}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=replay",
        f"actor_rollout_ref.rollout.router_config_path={built.router}",
        "trainer.v1.sampler.custom_sampler.path=pkg://benchmarks.faults.replay",
        "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
        'trainer.logger=["console","file"]',
        *((*TLT, f"tlt.speculation.costs_dir={target}/tables") if tlt else ()),
    ]
    return env, command


def _take_turns(path: Path) -> None:
    """Force lengths so that replicas take turns at having the step's long response; the other one is idle soon."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    for i, row in enumerate(rows):
        lengths = [SHORT + 3 * k for k in range(len(row["extra_info"]["forced_lengths"]))]
        step = i // BATCH + 1
        if i % BATCH == (0 if step % 2 else 1):  # the router sends response 0 of prompt i to replica i modulo 2
            lengths[0] = LONG
        row["extra_info"]["forced_lengths"] = lengths
    pq.write_table(pa.Table.from_pylist(rows), path)


def _ask_where_it_stands(tree: ProcessTree) -> None:
    for process in tree.alive():
        if process.pid != tree.process.pid and "ray::" in process.name():
            process.send_signal(signal.SIGABRT)
    time.sleep(2)


def _left(tree: ProcessTree) -> list[str]:
    """What a run that has ended by itself has not cleared away."""
    deadline = time.time() + SETTLE_S
    while (alive := tree.alive()) and time.time() < deadline:
        time.sleep(0.2)
    files = [path for path in tree.left_behind() if path.name != "ray"]  # Ray keeps its logs
    return sorted([*(f"process {_name(p)}" for p in alive), *map(str, files)])


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "that has just ended"
