"""Traces that somebody made to hurt: `verl-tlt report` ends soon, in a sentence or a page, and harms nothing else."""

import json
import os
import resource
import subprocess
import sys
import time

import pytest
from made_run import make_run
from typer.testing import CliRunner

from verl_tlt.commands.cli import app
from verl_tlt.commands.report.reader import MOST_ENGINE_BYTES, MOST_EVENT_BYTES, TraceError, read_trace
from verl_tlt.commands.report.steps import sentences

SOON_S, MEMORY = 30.0, 6 << 30
ROLLOUT = {"kind": "phase", "t": 2.0, "step": 1, "name": "rollout", "start": 1.0, "end": 2.0}
LOAD = {"kind": "load", "t": 1.5, "step": 1, "inflight": {"a": 1}}
STEP = {"kind": "step", "t": 2.0, "step": 1, "metrics": {"timing_s/gen": 1.0}}


def report(*words):
    """(exit status, output) of the command in this process."""
    result = CliRunner().invoke(app, ["report", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def put(directory, lines, name="trainer.jsonl"):
    directory.mkdir(exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (directory / name).write_text(text)
    return directory


def load(**inflight):
    return LOAD | {"inflight": inflight}


DEEP = "[" * 100_000 + "]" * 100_000
TRACES = {
    "names 40001 replicas": lambda: [ROLLOUT, LOAD, load(**dict.fromkeys(map(str, range(40_000)), 1))],
    "names 200000 replicas": lambda: [ROLLOUT, *(load(**{f"replica-{i}": 1}) for i in range(200_000))],
    "names 30000 replicas": lambda: [
        {"kind": "run", "t": 1.0, "step0": 1, "replicas": [*map(str, range(30_000))]},
        ROLLOUT,
    ],
    "names 60000 RL steps": lambda: [ROLLOUT | {"step": i} for i in range(60_000)],
    "2000 starts of a run": lambda: [{"kind": "run", "t": float(i), "step0": 1} for i in range(2000)],
    "first 84 lines 84 cannot be read": lambda: [f'{{"kind": "phase", "t": {DEEP}}}\n'] * 1200,
    "first 17 lines 17 cannot be read": lambda: ["\0" * (1 << 20)] * 100,
    "first 1001 lines 1001 cannot be read": lambda: ["{}\n"] * 5000,
}


@pytest.mark.parametrize("said", TRACES)
def test_what_no_run_writes_is_one_sentence_soon(tmp_path, said):
    directory, start = put(tmp_path / "trace", TRACES[said]()), time.monotonic()
    status, output = report(directory)
    assert status == 1 and said in output and output.count("\n") == 1, output[:500]
    assert time.monotonic() - start < SOON_S


def test_bounded_in_memory(tmp_path):
    """In a process that may not have more: long drafts, and a file as large as a disk."""
    directory = put(tmp_path / "trace", [ROLLOUT, LOAD])
    step = {"t": 1.5, "batch": 1, "k": 1, "accepted": [1]}
    put(directory, [step] * 50_000 + [step | {"accepted": [1] * 200_000}], "engine-a.jsonl")
    code = f"from verl_tlt.commands.report.reader import read_trace; print(read_trace({str(directory)!r}).skipped)"

    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    run = subprocess.run([sys.executable, "-c", code], preexec_fn=limited, capture_output=True, text=True, timeout=60)
    assert run.stdout == "0\n", run.stderr[-500:]
    with (directory / "large.jsonl").open("wb") as sparse:
        sparse.truncate(MOST_EVENT_BYTES + 1)
    with pytest.raises(TraceError, match=r"holds \d+ bytes in files other than engine-"):
        read_trace(directory)


def test_too_many_engine_steps_are_left_out_and_the_rest_is_read(tmp_path):
    directory = put(tmp_path / "trace", [ROLLOUT, LOAD, {"kind": "step", "t": 3.0, "step": 1, "metrics": {"a": 1.0}}])
    with (directory / "engine-0.jsonl").open("wb") as sparse:
        sparse.truncate(MOST_ENGINE_BYTES + 1)
    trace = read_trace(directory)
    assert trace.steps == {1: {"a": 1.0}} and not trace.engines
    assert any("8.6 GB of steps" in sentence for sentence in sentences(trace))
    (directory / "trainer.jsonl").unlink()
    with pytest.raises(TraceError, match="bytes of engine steps and nothing else"):
        read_trace(directory)


def test_what_is_no_file_is_left_out_and_not_waited_for(tmp_path):
    far = {"kind": "step", "t": 2.0, "step": 10**400, "metrics": {}}
    directory = put(tmp_path / "trace", [ROLLOUT, LOAD, far])
    os.mkfifo(directory / "pipe.jsonl")
    (directory / "zero.jsonl").symlink_to("/dev/zero")
    (directory / "loop.jsonl").symlink_to(directory / "loop.jsonl")
    assert read_trace(directory).skipped == 1
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    status, output = report(tmp_path / "loop")
    assert status == 1 and output.count("\n") == 1


def test_any_number_can_be_drawn(tmp_path):
    names = ("tlt/saved_s", "timing_s/step", "perf/total_num_tokens", "critic/score/mean", "tlt/accept_length")
    events = [
        ROLLOUT, load(a=10**17, b=-(10**17)), ROLLOUT | {"step": 2, "start": -1e10, "end": 1e10},
        ROLLOUT | {"step": 3, "end": 1e305}, {"kind": "run", "t": -7e10, "step0": 1},
        {"kind": "session", "t": 2.0, "step": 1, "replica": "a", "start": 1e10, "end": -1e10, "loss": 1e300,
         "outcome": "stopped"},
        {"kind": "step", "t": 2.0, "step": 1,
         "metrics": {"timing_s/gen": 1.0, "response_length/mean": 1e-99, "prompt_length/mean": 0.0}
         | dict.fromkeys(names, 9e99)},
    ]  # fmt: skip
    status, output = report(put(tmp_path / "trace", events))
    assert status == 0, output


def test_nothing_is_written_through_a_link_nor_into_another_users_directory(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run" / "trace", steps=2)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "run" / "report.html").symlink_to(precious)
    assert report(run.directory)[0] == 0
    assert precious.read_text() == "precious"

    if os.geteuid() == 0:
        os.chown(tmp_path / "run", 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    before = sorted((tmp_path / "run").iterdir())
    status, output = report(run.directory)
    assert status == 1 and "belongs to user" in output and "--out" in output
    assert sorted((tmp_path / "run").iterdir()) == before
    assert report(run.directory, "--out", tmp_path / "mine")[0] == 0


def test_names_with_codes_of_a_terminal_are_quoted(tmp_path):
    evil = tmp_path / "evil\x1b[31m\x07"
    status, output = report(evil)
    assert status == 1 and "\x1b" not in output and r"evil\x1b[31m\x07" in output
    put(evil, [ROLLOUT, LOAD, STEP])
    status, output = report(evil, "--out", tmp_path / "out\x1b[2J")
    assert status == 0 and "\x1b" not in output


def test_a_byte_order_mark_costs_no_line_and_half_a_character_one(tmp_path):
    halves = [LOAD | {"inflight": {"\ud83d": 1}}, LOAD | {"inflight": {"a": 1}, "\ude00": 2}]
    trace = put(tmp_path / "trace", ["\ufeff" + json.dumps(ROLLOUT) + "\n", LOAD, STEP, *halves])
    assert (read_trace(trace).skipped, read_trace(trace).replicas) == (2, ["a"])
    status, output = report(trace, "--out", tmp_path / "out")
    assert status == 0, output
