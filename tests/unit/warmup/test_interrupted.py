"""A signal ends a command and every process of it, and the command says how to go on."""

import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("verl")


def test_a_warm_up_that_trains(settings, answer, prompts_file, policy_dir, tmp_path):
    options, output = answer(settings()), tmp_path / "output"
    words = ["warmup", "--model", policy_dir, "--prompts", prompts_file, "--out", options.out]
    # The first line about the training comes after a tenth of the steps, and without a limit on them after a minute.
    words += ["--response-length", 24, "--epochs", 9999, "--max-steps", 300, "--objective", "eagle"]
    command = [sys.executable, "-m", "verl_tlt.commands.cli", *map(str, words)]
    with output.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    deadline = time.monotonic() + 240
    while "train:" not in output.read_text():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, said = process.wait(timeout=60), output.read_text()
    assert code == 130 and "Traceback" not in said, said
    assert f"Interrupted: the same command goes on with what is in {options.work}" in said
    assert (options.work / "responses" / "responses.jsonl").is_file() and not options.out.exists()
