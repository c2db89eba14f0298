"""One real GRPO run and its resumption: stock `main_ppo`, Ray, FSDP2 and two vLLM replicas on the CPU, in fp32.

Response lengths are forced so that one replica runs dry long before the other: the first prompt of each batch has one
long response, everything else is short. Draft lengths are fixed, so acceptance is measured from the first step on.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from verl_tlt.toy.assets import build_assets
from verl_tlt.trace.reader import RunTrace, read_trace

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "demo_grpo.sh"
BATCH, LONG, SHORT = 4, 600, 40


@dataclass(frozen=True)
class Run:
    """A finished run."""

    out: Path
    steps: dict[int, dict[str, float]]
    """verl's own metrics by step, from its `file` logger."""
    trace: RunTrace
    log: str


def skew(path: Path) -> None:
    """Rewrite the prompts' forced lengths: one long response in each batch of `BATCH` prompts."""
    rows = pq.read_table(path).to_pylist()
    for i, row in enumerate(rows):
        lengths = [SHORT + 3 * k for k in range(len(row["extra_info"]["forced_lengths"]))]
        if i % BATCH == 0:
            lengths[0] = LONG
        row["extra_info"]["forced_lengths"] = lengths
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(rows), path)


def grpo(out: Path, assets: Path, steps: int, *overrides: str, **environment: str) -> Run:
    """Run the demo's recipe, scaled down, to its end."""
    built = build_assets(assets, width="small", train_rows=64, val_rows=8)
    skew(built.train)
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OUT": str(out),
        "ASSETS": str(assets),
        "POLICY": str(built.policy),
        "AUX_LAYERS": ",".join(map(str, built.aux_layers)),
        "STEPS": str(steps),
        **environment,
    }
    command = [
        str(RECIPE),
        f"data.train_batch_size={BATCH}",
        "data.shuffle=False",
        "data.max_response_length=640",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.max_model_len=720",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={built.agent_loop}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forced_length",
        f"tlt.speculation.costs_dir={out}/tables",
        *overrides,
    ]
    done = subprocess.run(command, env=env, cwd=out.parent, capture_output=True, text=True, timeout=900)
    log = done.stdout + done.stderr
    assert done.returncode == 0, "\n".join(log.splitlines()[-40:])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Run(out, {line["step"]: line["data"] for line in lines}, read_trace(out / "trace"), log)


TLT = (
    "tlt.speculation.policy=fixed",
    "tlt.speculation.fixed=2",
    "tlt.drafter.learning_rate=2e-3",
    "tlt.drafter.intermediate_size=null",
    "tlt.drafter.warmup_steps=5",
    "tlt.drafter.batch_tokens=512",
    "tlt.buffer.min_tokens=300",
    "tlt.spot.max_epochs=8",
    "tlt.spot.min_merge_steps=2",
)


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """Five steps from a random head, with a checkpoint after the fourth."""
    base = tmp_path_factory.mktemp("grpo")
    return grpo(base / "run", base / "assets", 5, *TLT, SAVE_FREQ="4")


@pytest.fixture(scope="session")
def resumed(run) -> Run:
    """The same run, continued from its last checkpoint for one more step."""
    out = run.out.parent / "resumed"
    out.mkdir()
    (out / "checkpoints").symlink_to(run.out / "checkpoints")
    return grpo(out, run.out.parent / "assets", 6, *TLT, SAVE_FREQ="-1", RESUME="auto")
