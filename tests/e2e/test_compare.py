"""`verl-tlt compare` on the toy: real jobs in turns from one checkpoint, killed on the way and called again."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from grpo_run import one_long

from benchmarks.toy_job import NO_CLUSTER, RECIPE, make_assets, recipe_environment

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]
ROOT = Path(__file__).parents[2]
RECIPE_SETTINGS = (
    NO_CLUSTER,
    "data.shuffle=False",
    "data.train_batch_size=4",
    "data.max_response_length=160",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.max_model_len=256",
    "actor_rollout_ref.rollout.agent.default_agent_loop=forced_length",
)


@pytest.fixture
def command(tmp_path):
    """The command line with more options, its environment and its folder."""
    made = make_assets(tmp_path / "assets", partial(one_long, long=lambda index: index % 4 == 0, longest=120), rows=32)
    env = recipe_environment(tmp_path / "recipe", made, steps=2)
    out = tmp_path / "compared"
    loop = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={made.agent_loop}"
    recipe = [str(RECIPE), *RECIPE_SETTINGS, loop]

    def words(*options):
        ours = ["compare", "--steps", "2", "--out", str(out), *options, "--", *recipe]
        return [sys.executable, "-c", "from verl_tlt.commands.cli import app; app()", *ours]

    return words, env, out


def taken(out: Path):
    """(arm, turn) of the turns that are kept."""
    file = out / "turns.json"
    return [(row["arm"], row["turn"]) for row in json.loads(file.read_text())["turns"]] if file.exists() else []


def run(command, *more):
    words, env, _ = command
    done = subprocess.run(words(*more), env=env, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_comparison_takes_turns_from_one_start_and_goes_on_after_a_kill(command):
    words, env, out = command
    first = subprocess.Popen(words("--rounds", "1"), env=env, cwd=ROOT)
    deadline = time.monotonic() + 600
    while taken(out) != [("stock", 0)] or not (out / "tlt" / "job-1.log").exists():
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) != 0 and taken(out) == [("stock", 0)]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info.get("cmdline") or ())]
    finished = (out / "stock" / "job-1.log").stat().st_mtime

    said = run(command, "--rounds", "1")
    assert taken(out) == [("stock", 0), ("tlt", 0)] and (out / "stock" / "job-1.log").stat().st_mtime == finished
    assert "Too few steps to tell" in said and "tlt, job 1 of 1" in said
    run(command, "--rounds", "2", "--arms", "tlt")
    assert taken(out) == [("stock", 0), ("tlt", 0), ("tlt", 1), ("stock", 1)], "the order rotates"

    result = json.loads((out / "compare.json").read_text())
    steps = {row["arm"]: [s["step"] for r in result["turns"] if r["arm"] == row["arm"] for s in r["steps"]]
             for row in result["turns"]}  # fmt: skip
    assert steps == {"stock": [2, 4], "tlt": [2, 4]}, "each goes on where it was"
    prompts = {(s["step"], s["prompt"]) for row in result["turns"] for s in row["steps"]}
    assert len(prompts) == 2, "and had the prompts of the other"
    for arm in ("stock", "tlt"):
        assert [path.name for path in (out / arm).glob("global_step_*")] == ["global_step_4"]
    assert "tlt/" not in (out / "stock" / "job-2.jsonl").read_text()
    assert len(result["ratios"]["tlt"]["e2e_per_token"]["each"]) == 2
    assert (out / "tlt" / "trace").is_dir()
    with pytest.raises(AssertionError, match=r"another --steps \(2 then, 3 now\)"):
        run(command, "--steps", "3")
