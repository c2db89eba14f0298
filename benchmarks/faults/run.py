"""One GRPO run of the toy with faults armed, to its end: what it wrote, and what it left behind."""

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.plan import STEPS, Fault
from benchmarks.toy_job import QUICK_TO_LEARN, SAMPLES, Job, make_assets
from verl_tlt.commands.compare.job import read_rows
from verl_tlt.commands.interrupts import interruptible

ROOT = Path(__file__).parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
BATCH, LONG, SHORT = 4, 400, 40
LIMIT_S = 3000.0
"""A run that takes longer hangs."""

TLT = (
    *QUICK_TO_LEARN,
    "tlt.drafter.learning_rate=2e-3",
    "tlt.spot.max_epochs=30",
    "tlt.spot.stop_timeout_s=10",  # sessions get what time engines leave, which on a busy machine is little
    "tlt.gate.enable=false",  # whatever was trained is published, and so every step loads another drafter
)
REPLAY = (
    f"{ROLLOUT}.agent.agent_loop_config_path={Path(__file__).with_name('agent_loop.yaml')}",
    f"{ROLLOUT}.agent.default_agent_loop=replay",
    "trainer.v1.sampler.custom_sampler.path=pkg://benchmarks.faults.replay",
    "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
)
"""What is trained on is recorded in the first run and the same in later ones."""
REPLAYED = (
    *REPLAY,
    f"data.train_batch_size={BATCH}",
    f"data.max_response_length={LONG + 40}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    "actor_rollout_ref.actor.optim.lr=1e-5",
    f"{ROLLOUT}.max_model_len={LONG + 120}",
    f"{ROLLOUT}.max_num_seqs={BATCH * SAMPLES}",
    'trainer.logger=["console","file"]',
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
    name: str,
    out: Path,
    steps: int,
    faults: Sequence[Fault],
    *,
    tlt: bool = True,
    save_every: int = -1,
    overrides: Sequence[str] = (),
) -> FaultRun:
    """Run so many steps of the demo's recipe with these faults armed, or of stock verl, below `out`.

    There all runs share the prompts and the recorded responses. `save_every`: RL steps between checkpoints.
    `overrides`: of a run with TLT.
    """
    target, armed = out / name, out / f"{name}-armed"
    for old in (target, armed):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    (out / "recorded").mkdir(exist_ok=True)
    assets = make_assets(out / "assets", lengths, rows=BATCH * STEPS)
    own = (*TLT, *overrides) if tlt else ()
    environment = {
        **arm(armed, faults),
        "PYTHONFAULTHANDLER": "1",
        "TLT_FAULTS_RECORDED": str(out / "recorded"),
        "SAVE_FREQ": str(save_every),
        "TLT": "1" if tlt else "0",
    }
    begin = time.time()
    job = Job(target, assets, steps, (*REPLAYED, f"{ROLLOUT}.router_config_path={assets.router}", *own), **environment)
    try:
        status = job.wait(LIMIT_S)
        seconds = time.time() - begin
        left = [] if status is None else job.left()
    finally:
        job.end()
    by_step = read_rows(target / "metrics.jsonl")
    return FaultRun(target, -1 if status is None else status, seconds, by_step, job.said(), fired(armed), left)


def lengths(index: int) -> list[int]:
    """Of the responses to a prompt: replicas take turns at having the step's long one, and the other is idle soon.

    The router sends response 0 of prompt i to replica i modulo 2.
    """
    found = [SHORT + 3 * sample for sample in range(SAMPLES)]
    step = index // BATCH + 1
    if index % BATCH == (0 if step % 2 else 1):
        found[0] = LONG
    return found


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
