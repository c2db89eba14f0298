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


def test_a_script_that_has_not_started_verl_yet(tmp_path):
    script, child = tmp_path / "recipe.sh", tmp_path / "child"
    script.write_text(f"setsid sleep 600 & echo $! > {child}; wait\n")
    words = ["doctor", "--", "bash", script]
    code, said = interrupted(words, signal.SIGTERM, lambda _: child.exists() and child.read_text())
    assert code == 130 and "Traceback" not in said
    pid = int(child.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_warm_up_that_trains(settings, answer, prompts_file, policy_dir):
    options = answer(settings())
    words = ["warmup", "--model", policy_dir, "--prompts", prompts_file, "--out", options.out]
    # The first line about the training comes after a tenth of the steps, and without a limit on them after a minute.
    words += ["--response-length", 24, "--epochs", 9999, "--max-steps", 300, "--objective", "eagle"]
    code, said = interrupted(words, signal.SIGINT, lambda said: "train:" in said)
    assert code == 130 and "Traceback" not in said, said
    assert f"Interrupted: the same command goes on with what is in {options.work}" in said
    assert (options.work / "responses" / "responses.jsonl").is_file() and not options.out.exists()
