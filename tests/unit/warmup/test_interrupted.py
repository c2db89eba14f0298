"""Ctrl-C and SIGTERM end a command and every process of it, in whatever it is, and the command says how to go on."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("verl")
STUB = """
import json, os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # as Ray's daemons
print("the stub runs", flush=True)
with open(os.environ["CHILD"], "w") as file:
    file.write(str(child.pid))
time.sleep(600)
"""
RECIPE = """
[ "$VERL_TLT_APPEND" ] && exec {python} {stub}
{python} -m verl.trainer.main_ppo actor_rollout_ref.model.path={policy} data.train_files={prompts} \\
  data.val_files={prompts} data.train_batch_size=8 data.max_prompt_length=64 data.max_response_length=24 \\
  trainer.device=cpu trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.max_model_len=128 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 trainer.default_local_dir={folder}/checkpoints
"""


def heeds():
    """A shell that starts the tests in the background has them ignore Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def interrupted(words, number, begun):
    """(exit status, output) of a command that is sent a signal once `begun(its output so far)`."""
    command = [sys.executable, "-m", "verl_tlt.commands.cli", *map(str, words)]
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=heeds, start_new_session=True
        )
        deadline = time.monotonic() + 240
        while not begun(Path(output.name).read_text()):
            assert process.poll() is None and time.monotonic() < deadline, Path(output.name).read_text()
            time.sleep(0.05)
        process.send_signal(number)
        return process.wait(timeout=60), Path(output.name).read_text()


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A file with the id of a process that the user's command started."""
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    return tmp_path / "child"


def lives(child):
    pid = int(child.read_text())
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_script_that_has_not_started_verl_yet(tmp_path, child):
    (script := tmp_path / "recipe.sh").write_text("setsid sleep 600 & echo $! > $CHILD; wait\n")
    code, said = interrupted(
        ["doctor", "--", "bash", script], signal.SIGTERM, lambda _: child.exists() and child.read_text()
    )
    assert code == 130 and "Traceback" not in said and not lives(child)


def test_a_comparison_in_the_middle_of_a_turn(tmp_path, child, policy_dir, prompts_file):
    (stub := tmp_path / "stub.py").write_text(STUB)
    recipe = RECIPE.format(
        python=sys.executable, stub=stub, policy=policy_dir, prompts=prompts_file, folder=tmp_path
    )  # fmt: skip
    (script := tmp_path / "recipe.sh").write_text(recipe)
    words = ["compare", "--out", tmp_path / "out", "--", "bash", script]
    code, said = interrupted(words, signal.SIGTERM, lambda _: child.exists() and child.read_text())
    assert code == 130 and "Traceback" not in said and not lives(child), said
    assert "The same command takes the turns that are left." in said
    assert (tmp_path / "out" / "turns.json").is_file()


def test_a_warm_up_that_trains(settings, answer, prompts_file, policy_dir):
    options = answer(settings())
    words = ["warmup", "--model", policy_dir, "--prompts", prompts_file, "--out", options.out, "--device", "cpu"]
    words += ["--response-length", 24, "--epochs", 9999, "--objective", "eagle"]
    code, said = interrupted(words, signal.SIGINT, lambda said: "train:" in said)
    assert code == 130 and "Traceback" not in said, said
    assert f"Interrupted: the same command goes on with what is in {options.work}" in said
    assert (options.work / "responses" / "responses.jsonl").is_file() and not options.out.exists()
